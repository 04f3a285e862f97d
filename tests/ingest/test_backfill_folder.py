"""Backfill of a folder: what is a document there, what it is called, which version it is, and what is left out."""

import os

import pytest

from ingest.sources import Why, survey
from schemas.errors import InputError
from schemas.events import MAX_CONTENT_BYTES
from schemas.ids import packed_version
from tests.ingest.backfilling import WRITTEN_S, backfill, file, jsonl, messages
from tests.ingest.formats_world import PDFS
from tests.ingest.world import document

VERSION = packed_version(WRITTEN_S * 1000, 0)


def left_out(source):
    return {one.doc_id: one.why for one in source.left_out}


def test_every_kind_of_document_in_a_folder_becomes_servable_under_its_path(world, tmp_path):
    folder = tmp_path / "wiki"
    file(folder / "hr" / "leave.md", "# Annual leave\n\nEverybody has 30 days.")
    file(folder / "hr" / "Sick.TXT", "\ufeffCall before nine.")
    file(folder / "page.html", "<html><title>Page</title><body><h1>Doors</h1><p>The door is blue.</p></body></html>")
    file(folder / "paper.pdf", PDFS["two pages"])
    jsonl(folder / "more.jsonl", {"doc_id": "row", "content": "from a row"})
    done = backfill(world, folder, root=tmp_path)
    assert (done.total, done.committed, done.prefilled, done.dead) == (5, 5, 5, 0)
    heads = {head.doc_id: head for head in world.qdrant.documents()}
    assert {name: head.title for name, head in heads.items()} == {
        "wiki/hr/leave.md": "Annual leave",
        "wiki/hr/Sick.TXT": "Sick",
        "wiki/page.html": "Page",
        "wiki/paper.pdf": "paper",
        "row": None,
    }
    assert {head.version for head in heads.values()} == {VERSION}
    assert world.texts("wiki/hr/Sick.TXT") == "Call before nine.", "a byte order mark is no text"
    assert "The door is blue." in world.texts("wiki/page.html")
    assert "Annual leave" in world.texts("wiki/paper.pdf")
    world.assert_clean()


def test_a_folder_a_file_in_it_and_another_root_agree_on_ids(tmp_path, monkeypatch):
    """Bug: backfilling one file of a folder again made a second document."""
    inside = file(tmp_path / "wiki" / "hr" / "leave.md", "text")
    ids = [survey([path], root=tmp_path).pieces[0].doc_id for path in (inside, inside.parent, tmp_path / "wiki")]
    assert ids == ["wiki/hr/leave.md"] * 3
    monkeypatch.chdir(tmp_path / "wiki")
    assert survey([inside.parent]).pieces[0].doc_id == "hr/leave.md"
    with pytest.raises(InputError, match=r"lies outside .*name another folder with --root"):
        survey([tmp_path / "wiki"], root=tmp_path / "elsewhere")


def test_only_a_file_that_changed_is_taken_again(world, tmp_path):
    for n in range(5):
        file(tmp_path / f"{n}.md", f"text {n}")
    backfill(world, tmp_path, root=tmp_path)
    file(tmp_path / "3.md", "another text", WRITTEN_S + 1)
    world.embedder.embedded.clear()
    done = backfill(world, tmp_path, root=tmp_path)
    assert (done.committed, done.repeated, done.superseded, done.dead) == (1, 4, 0, 0)
    assert world.embedder.embedded == ["another text"]


def test_a_file_that_changed_without_its_time_is_a_dead_letter(world, tmp_path):
    """Bug: the changed content was never ingested, and nobody was told."""
    file(tmp_path / "a.md", "text")
    backfill(world, tmp_path, root=tmp_path)
    file(tmp_path / "a.md", "another text")
    assert backfill(world, tmp_path, root=tmp_path).dead == 1
    assert "ingested before with other content" in world.dead_letters()[0]["message"]
    assert world.texts("a.md") == "text"


def test_what_is_no_document_is_counted_and_named(tmp_path):
    """Bug: a folder of 900 files gave 850 documents, and nothing said which 50 were not there."""
    file(tmp_path / "a.md", "text")
    file(tmp_path / "sheet.xlsx", "cells")
    file(tmp_path / "_SUCCESS", "")
    file(tmp_path / ".git" / "config.txt", "hidden")
    file(tmp_path / ".draft.md", "hidden")
    (tmp_path / "around").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "nowhere.md").symlink_to(tmp_path / "absent.md")
    (tmp_path / "other.md").symlink_to(tmp_path / "a.md")
    os.mkfifo(tmp_path / "pipe.txt")
    file(tmp_path / "huge.txt", b"x" * (MAX_CONTENT_BYTES + 1))
    file(tmp_path / "huge.pdf", b"x" * (MAX_CONTENT_BYTES * 3 // 4 + 1))
    (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("text")
    source = survey([tmp_path], root=tmp_path)
    assert [piece.doc_id for piece in source.pieces] == ["a.md", "other.md"], "links to files are files"
    assert left_out(source) == {
        "sheet.xlsx": Why.KIND,
        "_SUCCESS": Why.KIND,
        ".git": Why.HIDDEN,
        ".draft.md": Why.HIDDEN,
        "around": Why.FOLDER_LINK,
        "nowhere.md": Why.ACCESS,
        "pipe.txt": Why.SPECIAL,
        "huge.txt": Why.SIZE,
        "huge.pdf": Why.SIZE,
        os.fsdecode(b"caf\xe9.md"): Why.NAME,
    }
    assert {one.doc_id for one in source.left_out if one.why.is_fault} == {
        "nowhere.md",
        "huge.txt",
        "huge.pdf",
        os.fsdecode(b"caf\xe9.md"),
    }
    assert all(one.path.isprintable() for one in source.left_out)


@pytest.mark.parametrize("name", [b"caf\xe9.md", b"caf\xe9.jsonl", b"caf\xe9"])
def test_a_path_whose_name_is_not_utf_8_is_refused_where_it_is_named_itself(tmp_path, name):
    """Bug: the run ended with a UnicodeEncodeError when the first event was made of it."""
    path = tmp_path / os.fsdecode(name)
    if path.suffix:
        path.write_text('{"doc_id": "a", "content": "text"}')
    else:
        path.mkdir()
    with pytest.raises(InputError, match=r"caf\\udce9\S*: the name is not UTF-8; rename it"):
        survey([path], root=tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    """Bug: a share that was not mounted looked like an empty folder; with --prune that deletes everything."""
    missing = tmp_path / "gone"
    missing.symlink_to(tmp_path / "absent", target_is_directory=True)
    with pytest.raises(InputError, match="gone does not exist"):
        survey([missing], root=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("binary.txt", b"\x89PNG\r\n\x1a\n\xff\xfe", "the value is not UTF-8"),
        ("utf16.md", "text".encode("utf-16"), "the value is not UTF-8"),
        ("scan.pdf", b"no pdf at all", "the content is no PDF"),
        ("empty.md", b"  \n", "the document is empty"),
        ("nul.txt", b"a\x00b", "holds a NUL character"),
    ],
)
def test_a_file_that_holds_no_text_is_a_dead_letter_and_hides_no_other(world, tmp_path, name, content, said):
    file(tmp_path / "good.md", "good")
    file(tmp_path / name, content)
    done = backfill(world, tmp_path, root=tmp_path)
    assert (done.committed, done.dead) == (1, 1)
    (letter,) = world.dead_letters()
    assert said in letter["message"]
    assert letter["topic"] == name
    assert world.texts("good.md") == "good"


def test_a_file_that_is_gone_when_it_is_to_be_read_is_no_document_and_stops_nothing(world, tmp_path, caplog):
    """A folder that people work in changes while it is read."""
    gone, kept = file(tmp_path / "a.md", "text"), file(tmp_path / "b.md", "text")
    source = survey([tmp_path], root=tmp_path)
    gone.unlink()
    done = backfill(world, source=source)
    assert (done.total, done.committed, done.dead) == (1, 1, 0)
    assert world.texts(kept.name) == "text"
    assert "a.md is gone" in caplog.text


def test_ids_of_documents_and_their_messages_name_the_tenant(world, tmp_path):
    file(tmp_path / "a.md", "text")
    file(tmp_path / "{b.md", "text")
    source = survey([tmp_path], root=tmp_path, tenant="acme")
    backfill(world, source=source)
    assert {head.document for head in world.qdrant.documents()} == {
        document("a.md", "acme"),
        document("{b.md", "acme"),
    }
    assert len(messages(source)) == 2


def test_a_heading_that_is_too_long_for_a_title_is_cut(world, tmp_path):
    """A whole text may stand on one line."""
    file(tmp_path / "a.md", "# " + "word " * 2_000)
    assert backfill(world, tmp_path, root=tmp_path).committed == 1
    assert len(world.qdrant.heads([document("a.md")])[document("a.md")].title) == 4096
