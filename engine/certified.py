"""What a certificate of this engine covers, and the certificates that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from schemas.certificate import Certificate, Coverage
from schemas.fingerprint import Fingerprint
from schemas.ids import digest, token_digest

if TYPE_CHECKING:
    from engine.prompt import PromptTemplate

# How this engine computes. Raise a number when what is computed changes, not when only speed does: certificates that
# were made before are invalid then, and `blend` falls back to `exact` until `kvquilt verify` has run.
BEHAVIOUR = {"prefill": 1, "stitch": 1, "repair": 1, "policies": 3}


def behaviour() -> str:
    """`BEHAVIOUR` as one word."""
    return ",".join(f"{name}/{number}" for name, number in BEHAVIOUR.items())


def coverage(fingerprint: Fingerprint, template: PromptTemplate, company: Sequence[int] | None = None) -> Coverage:
    """What a certificate must say to be valid here; `company` other than the packaged one's ids."""
    from engine.variants import company_ids

    ids = [template.prefix_ids, template.separator_ids, template.lead_ids, template.tail_ids]
    return Coverage(
        fingerprint=fingerprint.digest,
        tokenizer_sha256=fingerprint.tokenizer_sha256,
        template_sha256=digest([list(each) for each in ids]),
        company_sha256=token_digest(company_ids(template.tokenizer) if company is None else company),
        kvquilt=behaviour(),
    )


def packaged_certificates() -> list[Certificate]:
    """Those of the packaged model, one per dtype."""
    folder = files("engine") / "certificates"
    if not folder.is_dir():
        return []
    found = [file for file in folder.iterdir() if file.name.endswith(".json")]
    return [Certificate.from_bytes(file.read_bytes()) for file in sorted(found, key=lambda file: file.name)]
