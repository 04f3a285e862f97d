"""A model's certificate: that its rows can be moved and repaired exactly, and how close each policy and budget comes.

Made by `kvquilt verify`, kept with the generation and, for the packaged model, in the package. It covers one model in
one dtype behind one prompt template, computed by one behaviour of kvquilt; whatever of these changes makes it invalid,
and an invalid one is treated as none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import InputError
from schemas.events import describe
from schemas.ids import canonical_bytes, digest

CERTIFICATE_FORMAT = 1
_COVERED = {
    "fingerprint": "the model, its weights or its dtype",
    "tokenizer_sha256": "the tokenizer",
    "template_sha256": "the prompt template",
    "company_sha256": "the company's text",
    "kvquilt": "kvquilt",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Coverage(_Frozen):
    """What a certificate is about; two are equal or it is invalid.

    `fingerprint` is the fingerprint's digest, so that dtype and RoPE tables count; `template_sha256` is over the ids
    of prefix, separator, lead and tail; `kvquilt` names how kvquilt computes (`engine.certified.BEHAVIOUR`).
    """

    fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    company_sha256: str
    kvquilt: str


class Conformance(_Frozen):
    """One check: the largest difference, relative to the largest value, and how much is allowed. None: no number."""

    name: str
    passed: bool
    error: float | None = None
    bound: float | None = None
    says: str = ""


class CertifiedRow(_Frozen):
    """How close one method comes to full attention, measured over questions that need no data."""

    variant: str
    policy: str
    options: dict[str, Any] = Field(default_factory=dict)
    budget: float = Field(ge=0, le=1)
    kl: float = Field(ge=0)  # nats, mean over questions and answer tokens
    kl_high: float = Field(ge=0)  # upper end of its bootstrap interval
    kl_first: float = Field(ge=0)
    retention: float | None
    asked: int = Field(ge=0)  # questions behind `retention`
    ttft_s: float = Field(ge=0)
    ttft_ratio: float | None  # how many times sooner than full attention


class Certificate(_Frozen):
    """See the module. `model` and `measured` are for people; `covers` decides."""

    format: int = CERTIFICATE_FORMAT
    model: str
    dtype: str
    covers: Coverage
    checks: tuple[Conformance, ...]
    questions: int = Field(ge=0)
    measured: dict[str, Any] = Field(default_factory=dict)  # set, form, machine
    rows: tuple[CertifiedRow, ...]

    @property
    def conformant(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def digest(self) -> str:
        """SHA-256 over its canonical bytes."""
        return digest(self.model_dump(mode="json"))

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return canonical_bytes(self.model_dump(mode="json")) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Certificate:
        """Read one.

        Raises:
            InputError: it is not a certificate of this format.
        """
        try:
            certificate = cls.model_validate_json(data)
        except ValidationError as error:
            raise InputError(f"not a certificate: {describe(error)}; run `kvquilt verify` again") from error
        if certificate.format != CERTIFICATE_FORMAT:
            raise InputError(
                f"a certificate of format {certificate.format}; this release reads {CERTIFICATE_FORMAT}: run "
                "`kvquilt verify` again"
            )
        return certificate


def invalid_reason(certificate: Certificate, covers: Coverage) -> str | None:
    """Why a certificate does not hold for what is in use; None where it does."""
    changed = [what for name, what in _COVERED.items() if getattr(certificate.covers, name) != getattr(covers, name)]
    if changed:
        return f"it was made for another state of {' and '.join(changed)}"
    failed = [check.name for check in certificate.checks if not check.passed]
    if failed or not certificate.checks:
        return f"the model failed {', '.join(failed) or 'to be checked at all'}"
    return None


def first_valid(certificates: Iterable[Certificate], covers: Coverage) -> tuple[Certificate | None, str]:
    """The first one that holds; without one, a sentence that says why.

    Args:
        certificates: the generation's own first, then the packaged ones.
        covers: what is in use.
    """
    reasons = []
    for certificate in certificates:
        reason = invalid_reason(certificate, covers)
        if reason is None:
            return certificate, ""
        reasons.append(reason)
    told = f"; of {len(reasons)} found, the nearest: {min(reasons, key=len)}" if reasons else ""
    return None, f"there is no valid certificate for this model and prompt{told}. `kvquilt verify` makes one"


def pick(certificate: Certificate, max_kl: float, variant: str) -> CertifiedRow | None:
    """The cheapest method for rows of that variant whose certified KL is under `max_kl`; None where none is.

    Cheapest is the smallest budget, then the shortest time to the first token as it was measured.
    """
    good = [row for row in certificate.rows if row.variant == variant and row.kl < max_kl]
    return min(good, key=lambda row: (row.budget, row.ttft_s, row.policy), default=None)
