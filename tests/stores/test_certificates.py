"""The certificate of a generation in the object store."""

from __future__ import annotations

from schemas.certificate import Certificate, Coverage
from stores import CertificateStore, open_blobs

COVERS = Coverage(fingerprint="f", tokenizer_sha256="t", template_sha256="p", company_sha256="c", kvquilt="k")


def certificate(questions: int) -> Certificate:
    return Certificate(model="m", dtype="float32", covers=COVERS, checks=(), questions=questions, rows=())


def test_a_new_certificate_takes_the_place_of_the_old(tmp_path) -> None:
    blobs = open_blobs(tmp_path.as_uri())
    store = CertificateStore(blobs, "g1")
    assert store.all() == []
    store.put(certificate(1))
    store.put(certificate(1))
    store.put(certificate(2))
    assert store.all() == [certificate(2)]
    assert CertificateStore(blobs, "g2").all() == []


def test_one_that_cannot_be_read_counts_as_none(tmp_path) -> None:
    """A damaged object must not keep the service from starting: it answers in exact mode."""
    blobs = open_blobs(tmp_path.as_uri())
    store = CertificateStore(blobs, "g1")
    key = store.put(certificate(1))
    assert key.startswith("certificates/g1/")
    blobs.put_new("certificates/g1/torn.json", certificate(2).to_bytes()[:100])
    assert store.all() == [certificate(1)]
