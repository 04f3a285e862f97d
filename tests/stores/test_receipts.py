"""Deletion receipts in the object store: written once, listed by document, damaged ones named."""

import pytest

from schemas.errors import BlobError
from schemas.ids import DocumentKey
from schemas.receipt import Place, ReceiptPart, ReceiptState, Stage, judge
from stores.blobs import open_blobs
from stores.receipts import Receipts

DOCUMENT = DocumentKey("acme", "guides/lake")


@pytest.fixture
def blobs(tmp_path):
    return open_blobs((tmp_path / "blobs").as_uri())


@pytest.fixture
def receipts(blobs):
    return Receipts(blobs)


def part(stage=Stage.FOUND, found=3, left=0, version=7, at_ms=100):
    return ReceiptPart(
        tenant=DOCUMENT.tenant,
        doc_id=DOCUMENT.doc_id,
        version=version,
        generation="g",
        stage=stage,
        asked_ms=50,
        at_ms=at_ms,
        found={Place.POINTS: found, Place.OBJECTS: found},
        left={Place.POINTS: left, Place.OBJECTS: 0},
    )


def parts(*made):
    return {one.stage: one for one in made}


def judged(noted, left=0, passed=True):
    left_now = {Place.POINTS: left, Place.OBJECTS: 0}
    return judge(DOCUMENT, 7, "g", noted, left_now, 200, prefill_passed=passed)


def test_a_part_is_written_once_and_the_first_one_stays(receipts):
    """A second pass that found less would make the receipt say that less was there."""
    assert receipts.note(part(found=3)) == part(found=3)
    assert receipts.note(part(found=0)) == part(found=3)
    assert receipts.parts(DOCUMENT, 7, "g") == parts(part(found=3))


def test_a_complete_receipt_takes_the_place_of_its_parts(receipts, blobs):
    for stage in (Stage.FOUND, Stage.INDEX):
        receipts.note(part(stage))
    receipt = judged(receipts.parts(DOCUMENT, 7, "g"))
    assert receipts.complete(receipt) == receipt
    assert receipts.get(DOCUMENT, 7, "g") == receipt
    assert [key for key, _ in blobs.list("")] == [f"receipts/{DOCUMENT.tenant_digest}/{DOCUMENT.digest}/7.g.json"]


def test_the_first_complete_receipt_stays(receipts):
    first = judged(parts(part(), part(Stage.INDEX)))
    receipts.complete(first)
    assert receipts.complete(first.model_copy(update={"complete_ms": 999})) == first


def test_a_pending_receipt_is_never_kept(receipts):
    with pytest.raises(ValueError, match="the receipt of acme/guides/lake version 7 is not complete"):
        receipts.complete(judged(parts(part(), part(Stage.INDEX)), left=1))


def test_what_is_kept_is_listed_by_document_and_tenant(receipts, blobs):
    receipts.note(part(version=10))
    receipts.note(part(version=9))
    receipts.note(part().model_copy(update={"tenant": "other"}))
    blobs.put_new(f"receipts/{DOCUMENT.tenant_digest}/{DOCUMENT.digest}/notes.txt", b"by hand")
    assert [name.version for name in receipts.of(DOCUMENT)] == [9, 10]
    assert len(receipts.all()) == 3
    assert len(receipts.all(DOCUMENT.tenant_digest)) == 2
    assert receipts.part(receipts.of(DOCUMENT)[0]) == part(version=9)


def test_a_damaged_receipt_says_which_object_it_is(receipts, blobs):
    path = f"receipts/{DOCUMENT.tenant_digest}/{DOCUMENT.digest}/7.g.json"
    blobs.put_new(path, b"{}")
    with pytest.raises(BlobError, match=f"{path}: not a Receipt: Field required"):
        receipts.get(DOCUMENT, 7, "g")


def counts(receipt):
    return next((c.found, c.deleted, c.left) for c in receipt.counts if c.place is Place.POINTS)


@pytest.mark.parametrize(
    ("noted", "left", "passed", "expected", "missing"),
    [
        (parts(part(), part(Stage.INDEX)), 0, True, (3, 3, 0), ()),
        (parts(), 0, False, (0, 0, 0), ("the index pipeline has not", "the prefill pipeline has not")),
        (parts(part()), 2, False, (3, 1, 2), ("the index pipeline", "the prefill pipeline", "2 left in vectors/index")),
        (parts(part(), part(Stage.INDEX)), 0, False, (3, 3, 0), ("the prefill pipeline has not passed",)),
        (parts(part(), part(Stage.INDEX)), 1, True, (3, 2, 1), ("1 left in vectors/index",)),
        (parts(part(), part(Stage.INDEX, left=1), part(Stage.PREFILL, found=3)), 0, False, (5, 5, 0), ()),
        (parts(part(found=1), part(Stage.INDEX, found=4)), 0, True, (4, 4, 0), ()),
        (parts(part(Stage.INDEX, found=0)), 2, True, (2, 0, 2), ("2 left in vectors/index",)),
    ],
    ids=[
        "done",
        "nothing yet",
        "begun",
        "not passed",
        "one kept",
        "put late",
        "a second pass found more",
        "came since",
    ],
)
def test_a_receipt_is_complete_only_at_zero_and_after_both_pipelines(noted, left, passed, expected, missing):
    receipt = judged(noted, left, passed)
    assert counts(receipt) == expected
    assert len(receipt.missing) == len(missing)
    assert all(said.startswith(start) for said, start in zip(receipt.missing, missing, strict=True))
    assert receipt.state is (ReceiptState.PENDING if missing else ReceiptState.COMPLETE)
    assert receipt.complete_ms == (None if missing else 200)
