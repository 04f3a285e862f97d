"""`kvquilt verify`: a model's certificate, made, stored with its generation, and written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.context import Context
from engine import resolve_generation
from engine.policies import SERVED_LAYOUT, create_policy
from quality import load_subject
from quality.choices import NEAREST
from quality.methods import methods_of
from quality.results import Progress
from quality.verify import POLICIES, lines, verify
from schemas.certificate import Certificate, pick
from schemas.errors import InputError
from stores import CertificateStore, open_blobs


def verify_model(
    context: Context,
    *,
    policies: Sequence[str],
    budgets: Sequence[float],
    variants: Sequence[str],
    limit: int,
    file: Path | None,
    store: bool,
) -> None:
    """Check and measure the model of the settings.

    Raises:
        UnsupportedModelError: the model cannot be loaded.
        InputError: a policy, variant or budget that does not exist; a model that fails (its certificate is kept).
        BlobError: the certificate could not be stored.
    """
    settings = context.settings
    methods, _ = methods_of(policies or POLICIES, budgets, variants)
    if any(method.neighbours != NEAREST for method in methods):
        raise InputError("a certificate is about rows that are served: name variants without a choice of neighbours")
    for name, options in {(method.policy, method.options) for method in methods}:
        if create_policy(name, **dict(options)).layout != SERVED_LAYOUT:
            raise InputError(
                f"policy {name} wants prompts of a layout of its own, which are not served: `kvquilt eval` measures it"
            )
    generation = resolve_generation(settings).generation
    context.say(f"loading {settings.model.name} ({generation.fingerprint.dtype})")
    subject = load_subject(settings)
    with context.progress() as bar:
        task = bar.add_task("questions", total=None)

        def tell(told: Progress) -> None:
            bar.update(task, completed=told.done, total=told.total, description=told.doing[:60])

        certificate = verify(subject, methods, limit=limit, note=context.say, progress=tell)
    if file is not None:
        _write(file, certificate)
    if store:
        blobs = open_blobs(settings.blobs_url, settings.blobs.options)
        key = CertificateStore(blobs, generation.name).put(certificate)
        context.say(f"stored as {key} in {blobs.url}")
    chosen = pick(certificate, settings.quality.max_kl, generation.prefill_variant)
    bound = f"quality.max_kl = {settings.quality.max_kl:g}"
    verdict = f"nothing stays under {bound}: blend answers in exact mode"
    if chosen:
        verdict = f"blend takes {chosen.policy} at {chosen.budget:.0%}, whose KL {chosen.kl:.4f} is under {bound}"
    data = {
        **certificate.model_dump(mode="json"),
        "conformant": certificate.conformant,
        "generation": generation.name,
        "chosen": chosen.model_dump(mode="json") if chosen else None,
    }
    context.result(data, "\n".join([*lines(certificate.rows), verdict]))
    failed = [check.name for check in certificate.checks if not check.passed]
    if failed:
        raise InputError(f"{certificate.model} failed {', '.join(failed)}; it is served in exact mode only")


def _write(file: Path, certificate: Certificate) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(certificate.to_bytes())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error
