"""The checks of a certificate pass for every family that is reused, and fail for one that computes something else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.certified import BEHAVIOUR, coverage
from engine.conformance import check_conformance
from engine.hf_adapter import HfModel, spec_of
from engine.identity import make_fingerprint
from engine.model import Model
from engine.session import Session
from kernels import RopeLayout
from schemas.certificate import Certificate, invalid_reason
from schemas.fingerprint import Fingerprint
from tests.engine.conftest import REUSABLE, byte_tokenizer, random_ids, template_of, tiny_model, tiny_module

TEXT = random_ids(240, seed=8)


@pytest.fixture(scope="module", params=list(REUSABLE))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(REUSABLE[request.param]())


def test_every_family_passes_every_check_with_room(model: Model) -> None:
    """Bounds are for large models; a tiny one in fp32 must stay far below."""
    checks = check_conformance(model, template_of(model), TEXT)
    assert [check.name for check in checks] == [
        "rope",
        "shift 0",
        "shift 1",
        "shift 1000",
        "stitched",
        "repaired",
        "cached",
    ]
    assert all(check.passed for check in checks), checks
    assert all(check.error <= check.bound / 10 for check in checks if check.error is not None), checks


def test_a_model_that_is_refused_says_why(llama: Model) -> None:
    refused = tiny_model(REUSABLE["llama"]())
    refused.reuse_refusal = "its keys are rotated in a way that we do not know"
    (check,) = check_conformance(refused, template_of(refused), TEXT)
    assert (check.name, check.passed) == ("rope", False)
    assert check.says == refused.reuse_refusal


def test_a_wrong_rotation_fails_where_rows_are_moved() -> None:
    """Tables that turn the other way are right at position 0 only: near and far offsets must show it."""
    model = tiny_model(REUSABLE["llama"]())
    layout = RopeLayout(model._tables.layout.rotary_dim, sign=-1)
    model._tables = dataclasses.replace(model._tables, layout=layout)
    failed = {check.name for check in check_conformance(model, template_of(model), TEXT) if not check.passed}
    assert failed >= {"shift 1000", "stitched"}


def test_rows_that_are_lost_fail_the_cached_check(monkeypatch: pytest.MonkeyPatch, llama: Model) -> None:
    """An answer whose earlier tokens are not seen is caught, although every first token is right."""
    forgetful = Session.extend
    monkeypatch.setattr(Session, "extend", lambda self, ids, offset=0: forgetful(self, ids, offset + 500 * offset))
    checks = {check.name: check for check in check_conformance(llama, template_of(llama), TEXT)}
    assert not checks["cached"].passed
    assert checks["stitched"].passed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model, template: (dataclasses.replace(template, separator_ids=(9,)), None), "the prompt template"),
        (lambda model, template: (template, (4, 5)), "the company's text"),
    ],
)
def test_a_changed_prompt_or_company_makes_a_certificate_invalid(llama: Model, change, says) -> None:
    template = template_of(llama)
    covers = coverage(llama.fingerprint, template)
    certificate = Certificate(
        model="tiny",
        dtype="float32",
        covers=covers,
        checks=check_conformance(llama, template, TEXT),
        questions=0,
        rows=(),
    )
    assert invalid_reason(certificate, coverage(llama.fingerprint, template_of(llama))) is None
    changed, company = change(llama, template)
    reason = invalid_reason(certificate, coverage(llama.fingerprint, changed, company))
    assert reason == f"it was made for another state of {says}"


def test_a_changed_model_or_engine_makes_a_certificate_invalid(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(llama)
    covers = coverage(llama.fingerprint, template)
    checks = check_conformance(llama, template, TEXT)
    certificate = Certificate(model="tiny", dtype="float32", covers=covers, checks=checks, questions=0, rows=())
    other = Fingerprint(**{**llama.fingerprint.model_dump(), "dtype": "bfloat16"})
    assert "the model, its weights or its dtype" in str(invalid_reason(certificate, coverage(other, template)))
    monkeypatch.setitem(BEHAVIOUR, "repair", BEHAVIOUR["repair"] + 1)
    reason = invalid_reason(certificate, coverage(llama.fingerprint, template))
    assert reason == "it was made for another state of kvquilt"


def test_a_certificate_whose_check_failed_is_invalid(llama: Model) -> None:
    checks = check_conformance(llama, template_of(llama), TEXT)
    failed = [check.model_copy(update={"passed": check.name != "stitched"}) for check in checks]
    covers = coverage(llama.fingerprint, template_of(llama))
    certificate = Certificate(model="tiny", dtype="float32", covers=covers, checks=failed, questions=0, rows=())
    assert not certificate.conformant
    assert invalid_reason(certificate, covers) == "the model failed stitched"


def test_bfloat16_passes_with_its_own_bounds(llama: Model) -> None:
    """A model is served in bfloat16 on GPUs: rounding is not a fault."""
    config = REUSABLE["llama"]()
    module, tokenizer = tiny_module(config).to(torch.bfloat16), byte_tokenizer()
    fingerprint = make_fingerprint("tiny", spec_of(config), "0" * 64, tokenizer.digest, "bfloat16")
    model = Model(HfModel(module), spec_of(config), fingerprint, tokenizer, model_type="llama")
    checks = check_conformance(model, template_of(model), TEXT)
    assert all(check.passed for check in checks), checks
