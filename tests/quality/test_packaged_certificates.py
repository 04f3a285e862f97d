"""What is packaged holds for what is packaged."""

from __future__ import annotations

from engine import PromptTemplate, load_tokenizer, resolve_fingerprint
from engine.certified import coverage, packaged_certificates
from schemas.certificate import invalid_reason, pick
from schemas.settings import load_settings


def test_a_packaged_certificate_holds_for_the_packaged_model_and_the_default_prompt() -> None:
    """A changed prompt, or a raised `BEHAVIOUR`, would leave the default in exact mode without a word to us."""
    certificates = packaged_certificates()
    assert sorted(certificate.dtype for certificate in certificates) == ["bfloat16", "float32"]
    for certificate in certificates:
        settings = load_settings({"model": {"dtype": certificate.dtype}})
        cache = settings.cache_folder
        template = PromptTemplate.from_settings(load_tokenizer(settings.model, cache), settings.prompt)
        covers = coverage(resolve_fingerprint(settings.model, cache), template)
        assert invalid_reason(certificate, covers) is None
        chosen = pick(certificate, settings.quality.max_kl, settings.prefill.variant)
        assert chosen is not None, "blend would answer in exact mode out of the box"
