"""Pruning: what the source owns and no longer has goes, and nothing else, whatever comes in between."""

import os

import pytest

from ingest.formats import EventReader
from ingest.prune import missing, publish_deletions
from ingest.sources import survey
from schemas.errors import InputError
from schemas.receipt import ReceiptState
from tests.ingest.backfilling import WRITTEN_S, backfill, file, jsonl, written
from tests.ingest.world import document


def plan(world, *paths, owns=(), tenant="default", **options):
    source = survey(paths, tenant=tenant, clock=world.clock, **options)
    return missing(world.index_parts, EventReader(), source, tenant, owns)


def prune(world, planned):
    """What `run_backfill` does at its end."""
    deletions = publish_deletions(world.index_parts, planned)
    return backfill(world, source=Pieces((deletions,)))


class Pieces:
    def __init__(self, pieces):
        self.pieces = pieces


def names(planned):
    return sorted(head.doc_id for head in planned.heads)


@pytest.fixture
def wiki(world, tmp_path):
    """A folder of five documents that is servable."""
    for n in range(5):
        file(tmp_path / "wiki" / f"{n}.md", f"text {n}")
    backfill(world, tmp_path / "wiki", root=tmp_path)
    return tmp_path / "wiki"


def test_what_a_folder_no_longer_has_is_deleted_with_a_receipt_and_stays_deleted(world, wiki):
    (wiki / "3.md").unlink()
    planned = plan(world, wiki, root=wiki.parent)
    assert (names(planned), planned.n_owned, planned.takes_most) == (["wiki/3.md"], 5, False)
    assert prune(world, planned).committed == 1
    gone = document("wiki/3.md")
    (head,) = world.qdrant.heads([gone]).values()
    receipt = world.index_parts.receipts.get(gone, head.version, world.index_parts.generation.name)
    assert receipt.state is ReceiptState.COMPLETE
    assert world.texts("wiki/3.md") is None
    assert world.texts("wiki/2.md") == "text 2"
    world.index()  # the tombstone is in the topic too
    world.prefill()
    world.assert_clean()
    assert names(plan(world, wiki, root=wiki.parent)) == []


def test_documents_of_other_sources_and_tenants_are_none_of_its_business(world, wiki):
    """Bug: the nightly backfill of the wiki deleted everything that was not in the wiki."""
    world.change("by hand", doc_id="other")
    world.change("alike", doc_id="wikipedia")
    world.change("of another tenant", doc_id="wiki/9.md", tenant="acme")
    world.index()
    (wiki / "3.md").unlink()
    world.clock.advance(10)
    assert names(plan(world, wiki, root=wiki.parent)) == ["wiki/3.md"]


def test_files_of_rows_and_a_folder_that_is_the_root_must_be_told_what_they_own(world, wiki, tmp_path):
    """Bug: a file of three rows was taken for the whole corpus."""
    rows = jsonl(tmp_path / "a.jsonl", {"doc_id": "wiki/0.md", "content": "text 0"})
    written(rows, WRITTEN_S + 50)  # the wiki is older
    for source in ([rows], [tmp_path]):
        with pytest.raises(InputError, match=r"which documents are the source's\?.*--owns PREFIX"):
            plan(world, *source, root=tmp_path)
    assert names(plan(world, rows, owns=["wiki/"])) == [f"wiki/{n}.md" for n in (1, 2, 3, 4)]
    assert names(plan(world, rows, owns=["*"])) == [f"wiki/{n}.md" for n in (1, 2, 3, 4)]
    assert names(plan(world, rows, owns=["wiki/1"])) == ["wiki/1.md"]


def test_an_empty_source_takes_most(world, wiki):
    """Bug: the share was not mounted, the folder was empty, and so was the index afterwards."""
    for path in wiki.iterdir():
        path.unlink()
    planned = plan(world, wiki, root=wiki.parent)
    assert (len(planned.heads), planned.takes_most) == (5, True)


def test_a_document_that_changed_after_the_source_was_written_stays(world, tmp_path):
    """Bug: a document that was created after last night's export was deleted by this morning's backfill of it."""
    rows = jsonl(tmp_path / "a.jsonl", {"doc_id": "a", "content": "x"})
    world.change("text", doc_id="older")
    world.clock.advance(10)
    written(rows, world.clock.now_ms() / 1000)
    backfill(world, rows)
    world.clock.advance(10)
    world.change("text", doc_id="newer")
    world.index()
    planned = plan(world, rows, owns=["*"])
    assert (names(planned), planned.n_newer) == (["older"], 1)


@pytest.mark.parametrize("version", [None, 9])
@pytest.mark.parametrize("when", ["before the tombstone", "after the tombstone", "read first, written before"])
def test_a_live_change_during_the_backfill_wins_over_the_tombstone(world, wiki, version, when):
    """The same for documents that are ordered by time and for those whose producer counts, whoever comes first."""
    world.change("numbered", version and version - 2, doc_id="wiki/live")
    world.index()
    world.clock.advance(10)
    planned = plan(world, wiki, root=wiki.parent)
    assert names(planned) == ["wiki/live"]
    world.clock.advance(10)
    if when == "before the tombstone":
        world.change("live", version, doc_id="wiki/live")
        world.index()
        assert prune(world, planned).total == 0, "its head moved: no tombstone is written at all"
    elif when == "after the tombstone":
        assert prune(world, planned).committed == 1
        world.change("live", version, doc_id="wiki/live")
    else:
        deletions = publish_deletions(world.index_parts, planned)
        world.change("live", version, doc_id="wiki/live")
        world.index()
        assert backfill(world, source=Pieces((deletions,))).superseded == 1
    world.index()
    world.prefill()
    assert world.texts("wiki/live") == "live"
    assert world.dead_letters() == []
    world.assert_clean()


def test_what_is_left_out_of_a_folder_is_still_there(world, wiki):
    """Bug: a document that grew too large was deleted in place of being refused."""
    (wiki / "1.md").write_bytes(b"x" * (8 * 1024 * 1024 + 1))
    (wiki / "2.md").unlink()
    (wiki / "2.md").symlink_to(wiki / "absent")
    os.remove(wiki / "3.md")
    os.mkfifo(wiki / "3.md")
    (wiki / "4.md").write_bytes(b"\xff\xfe no text any more")
    assert names(plan(world, wiki, root=wiki.parent)) == []


def test_documents_in_a_folder_that_is_left_out_are_still_there(world, wiki):
    """Bug: a folder that was moved to another disk and linked lost all its documents, a hidden one at any time."""
    file(wiki / "big" / "deep" / "a.md", "text a")
    file(wiki / ".drafts" / "plan.md", "a plan")
    for folder in (wiki, wiki / ".drafts"):
        backfill(world, folder, root=wiki.parent)
    (wiki / "big").rename(wiki.parent / "elsewhere")
    (wiki / "big").symlink_to(wiki.parent / "elsewhere")
    file(wiki / "bigger" / "b.md", "text b")
    backfill(world, wiki / "bigger", root=wiki.parent)
    (wiki / "bigger" / "b.md").unlink()
    assert names(plan(world, wiki, root=wiki.parent)) == ["wiki/bigger/b.md"], "not in what is left out, but beside it"
    (wiki.parent / "elsewhere").rename(wiki.parent / "unmounted")
    assert names(plan(world, wiki, root=wiki.parent)) == ["wiki/bigger/b.md"], "the link leads nowhere now"


@pytest.mark.parametrize("name", [b"caf\xe9.jpg", b"caf\xe9.md", b".caf\xe9", b"caf\xe9/a.md"])
def test_a_name_that_is_not_utf_8_is_left_out_and_stops_no_pruning(world, wiki, name):
    """Bug: a photo with a Latin-1 name ended the run with a UnicodeEncodeError: no document can have such an id."""
    file(wiki / os.fsdecode(name), "text")
    (wiki / "3.md").unlink()
    assert names(plan(world, wiki, root=wiki.parent)) == ["wiki/3.md"]


def test_a_file_of_rows_that_is_left_out_stops_pruning_before_anything_is_done(world, wiki):
    """Its documents are called as they like: which of them are still there cannot be told."""
    jsonl(wiki / "rows.jsonl", {"doc_id": "wiki/row", "content": "text"})
    backfill(world, wiki, root=wiki.parent)
    (wiki / "rows.jsonl").unlink()
    (wiki / "rows.jsonl").symlink_to(wiki / "unmounted")
    with pytest.raises(InputError, match=r"which documents are in .*rows\.jsonl cannot be told: cannot be opened"):
        plan(world, wiki, root=wiki.parent)


def test_a_row_that_does_not_tell_its_document_stops_pruning_before_anything_is_done(world, wiki, tmp_path):
    """Bug: a line that was cut in half cost its document."""
    rows = jsonl(tmp_path / "a.jsonl", {"doc_id": "wiki/0.md", "content": "text 0"}, b'{"doc_id": "wiki/1.md", "con\n')
    with pytest.raises(InputError, match=r"row 1 of a\.jsonl does not tell which document it is about"):
        plan(world, rows, owns=["wiki/"])
