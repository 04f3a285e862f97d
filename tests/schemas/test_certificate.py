"""A certificate is read strictly, holds only for what it covers, and gives the cheapest method under a bound."""

from __future__ import annotations

import pytest

from schemas.certificate import Certificate, CertifiedRow, Conformance, Coverage, first_valid, pick
from schemas.errors import InputError

COVERS = Coverage(fingerprint="f", tokenizer_sha256="t", template_sha256="p", company_sha256="c", kvquilt="k")
PASSED = (Conformance(name="stitched", passed=True, error=1e-6, bound=1e-3),)


def row(policy: str, budget: float, kl: float, variant: str = "shared_prefix", ttft_s: float = 1.0) -> CertifiedRow:
    return CertifiedRow(
        variant=variant, policy=policy, budget=budget, kl=kl, kl_high=2 * kl, kl_first=kl, retention=None, asked=0,
        ttft_s=ttft_s, ttft_ratio=None,
    )  # fmt: skip


def certificate(*rows: CertifiedRow, covers: Coverage = COVERS, checks: tuple = PASSED) -> Certificate:
    return Certificate(model="m", dtype="float32", covers=covers, checks=checks, questions=3, rows=rows)


def test_it_is_the_same_after_writing_and_reading() -> None:
    made = certificate(row("none", 0.0, 0.1), row("closure", 0.1, 0.01))
    assert Certificate.from_bytes(made.to_bytes()) == made
    assert Certificate.from_bytes(made.to_bytes()).digest == made.digest


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a certificate"),
        (b"{}", "not a certificate"),
        (certificate().to_bytes().replace(b'"rows":[]', b'"rows":[],"more":1'), "not a certificate"),
        (certificate().to_bytes().replace(b'"format":1', b'"format":2'), "a certificate of format 2"),
        (certificate(row("none", 0.0, 0.125)).to_bytes().replace(b"0.125", b"NaN"), "not a certificate"),
        (certificate(row("none", 0.0, 0.125)).to_bytes().replace(b"0.125", b"-0.1"), "not a certificate"),
    ],
)
def test_what_is_not_one_is_refused(data: bytes, says: str) -> None:
    """A KL of NaN is under every bound, as far as Python's comparisons go the other way round."""
    with pytest.raises(InputError, match=says):
        Certificate.from_bytes(data)


def test_the_cheapest_method_under_the_bound_is_picked() -> None:
    made = certificate(
        row("none", 0.0, 0.2),
        row("closure", 0.05, 0.06),
        row("epic", 0.05, 0.09),
        row("closure", 0.15, 0.01, ttft_s=2.0),
        row("infoflow", 0.15, 0.01, ttft_s=1.5),
        row("none", 0.0, 0.001, variant="fused"),
    )
    assert pick(made, 0.5, "shared_prefix") == made.rows[0]
    assert pick(made, 0.07, "shared_prefix") == made.rows[1]
    assert pick(made, 0.05, "shared_prefix") == made.rows[4]  # of one budget, the sooner
    assert pick(made, 0.01, "shared_prefix") is None  # under the bound, not at it
    assert pick(made, 0.05, "fused") == made.rows[5]
    assert pick(made, 1.0, "company") is None


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("fingerprint", "the model, its weights or its dtype"),
        ("tokenizer_sha256", "the tokenizer"),
        ("template_sha256", "the prompt template"),
        ("company_sha256", "the company's text"),
        ("kvquilt", "kvquilt"),
    ],
)
def test_whatever_it_covers_makes_it_invalid_when_it_changes(field: str, what: str) -> None:
    now = COVERS.model_copy(update={field: "other"})
    found, reason = first_valid([certificate()], now)
    assert found is None
    assert reason.endswith(f"it was made for another state of {what}. `kvquilt verify` makes one")


def test_the_first_valid_one_is_taken() -> None:
    stale = certificate(covers=COVERS.model_copy(update={"kvquilt": "old"}))
    failed = certificate(checks=(Conformance(name="shift 1", passed=False, error=0.5, bound=0.1),))
    good = certificate(row("none", 0.0, 0.1))
    assert first_valid([stale, failed, good], COVERS) == (good, "")
    assert first_valid([failed], COVERS)[1].endswith("the model failed shift 1. `kvquilt verify` makes one")
    assert first_valid([certificate(checks=())], COVERS)[0] is None  # nothing was checked
    assert first_valid([], COVERS)[1].startswith("there is no valid certificate for this model and prompt. ")
