"""Files and JSON lines become change events; one that cannot is named and hides no other."""

import json
import os

import pytest

from cli.documents import files_in, read_documents
from ingest.formats import EventReader
from ingest.sources import survey
from schemas.errors import InputError
from schemas.events import MAX_CONTENT_BYTES
from stores.topics import Message


def read(file, root, **options):
    return list(read_documents(file, root=root, **options))


def event_of(outgoing):
    """As the pipeline reads it."""
    message = Message("documents", 0, 0, 1, outgoing.key, outgoing.value, outgoing.headers)
    return EventReader().parse(message)


def test_a_markdown_file_is_named_by_its_path_and_titled_by_its_heading(tmp_path):
    file = tmp_path / "hr" / "leave.md"
    file.parent.mkdir()
    file.write_text("\n# Annual leave\n\nEverybody has 30 days.\n")
    (outgoing,) = read(file, tmp_path, tenant="acme", version=4)
    event = event_of(outgoing)
    assert (event.doc_id, event.tenant, event.version) == ("hr/leave.md", "acme", 4)
    assert (event.content_type.value, event.title) == ("markdown", "Annual leave")


def test_a_folder_and_a_file_in_it_give_the_same_id(tmp_path):
    """Bug: publishing one changed file of a folder made a second document instead of a new version."""
    file = tmp_path / "handbook" / "leave.md"
    file.parent.mkdir()
    file.write_text("text")
    (inside,) = files_in([tmp_path / "handbook"])
    assert read(inside, tmp_path)[0].doc_id == read(file, tmp_path)[0].doc_id == "handbook/leave.md"


def test_publish_takes_the_files_of_a_folder_that_a_backfill_takes_under_the_same_ids(tmp_path):
    """Bug: a draft in a hidden folder was published, and the next backfill with --prune deleted it."""
    folder = tmp_path / "docs"
    for name in ("a.md", "deep/b.TXT", ".draft.md", ".drafts/plan.md", "sheet.xlsx", "rows.ndjson"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"doc_id": "row", "content": "text"}')
    (folder / "link.md").symlink_to(folder / "a.md")
    (folder / "around").symlink_to(folder, target_is_directory=True)
    published = [one.doc_id for file in files_in([folder]) for one in read(file, tmp_path)]
    backfilled = [message.key.decode() for piece in survey([folder], root=tmp_path).pieces for message in piece.read()]
    assert published == backfilled == ["docs/a.md", "docs/deep/b.TXT", "docs/link.md", "row"]


def test_a_file_in_a_folder_that_cannot_be_read_is_named_and_hides_no_other(tmp_path):
    """Bug: a name that is not UTF-8 was a traceback, and a link that leads nowhere was passed over in silence."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "nowhere.md").symlink_to(tmp_path / "absent.md")
    (tmp_path / "huge.md").write_bytes(b"x" * (MAX_CONTENT_BYTES + 1))
    (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("text")
    outcomes = [one for file in files_in([tmp_path]) for one in read(file, tmp_path)]
    assert [one.doc_id for one in outcomes if not isinstance(one, InputError)] == ["a.md"]
    refused = [str(one) for one in outcomes if isinstance(one, InputError)]
    assert [said.removeprefix(f"{tmp_path}/") for said in refused] == [
        r"caf\udce9.md: the name is not UTF-8; rename it",
        "huge.md has 8,388,609 bytes; at most 8,388,608 are accepted. Split the document",
        "nowhere.md cannot be read: No such file or directory",
    ]
    assert all(said.isprintable() for said in refused)


def test_a_line_that_deletes_must_name_its_tenant_if_it_names_one(tmp_path):
    """Bug: a null was a traceback."""
    file = tmp_path / "events.jsonl"
    file.write_text('{"doc_id": "a", "content": null, "tenant": null}\n{"doc_id": "\\ud800", "content": "x"}\n')
    tenant, doc_id = map(str, read(file, tmp_path))
    assert "events.jsonl:1: tenant must name the tenant (got None)" in tenant
    assert "events.jsonl:2: expected an object with" in doc_id


def test_a_plain_text_is_titled_by_its_name(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("# no heading here, this is text")
    assert event_of(read(file, tmp_path)[0]).title == "notes"


def test_a_file_outside_the_root_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "b.md"
    file.write_text("text")
    (refused,) = read(file, tmp_path / "a")
    assert "lies outside" in str(refused)
    assert "--root" in str(refused)


def test_lines_of_json_are_events_and_a_bad_line_is_named(tmp_path):
    file = tmp_path / "events.jsonl"
    lines = [
        json.dumps({"doc_id": "one", "content": "first"}),
        "{nonsense",
        json.dumps({"content": "whose?"}),
        json.dumps({"doc_id": "two", "content": ""}),
        "",
        json.dumps({"doc_id": "one", "content": None, "version": 9}),
        json.dumps({"doc_id": "three", "content": "third", "tenant": "acme"}),
    ]
    file.write_text("\n".join(lines))
    outcomes = read(file, tmp_path)
    sent = [event_of(outcome) for outcome in outcomes if not isinstance(outcome, InputError)]
    assert [(event.doc_id, event.deletes, event.tenant) for event in sent] == [
        ("one", False, "default"),
        ("one", True, "default"),
        ("three", False, "acme"),
    ]
    refused = [str(outcome) for outcome in outcomes if isinstance(outcome, InputError)]
    assert [
        "events.jsonl:2: not JSON" in refused[0],
        'events.jsonl:3: expected an object with "doc_id"' in refused[1],
    ] == [
        True,
        True,
    ]
    assert "events.jsonl:4: content: " in refused[2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the document is empty"),
        (b"caf\xe9", "is not UTF-8: unexpected end of data at byte 3"),
        (b"x" * (MAX_CONTENT_BYTES + 1), "at most 8,388,608 are accepted"),
    ],
)
def test_a_file_that_would_be_a_dead_letter_is_refused_here(tmp_path, content, said):
    file = tmp_path / "bad.md"
    file.write_bytes(content)
    (refused,) = read(file, tmp_path)
    assert isinstance(refused, InputError)
    assert said in str(refused)
    assert "bad.md" in str(refused)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "absent.md", "does not exist"),
        (lambda folder: folder, "holds no file that ends in .md"),
        (lambda folder: (folder / "scan.docx", (folder / "scan.docx").touch())[0], "ends in .docx; publish reads .md"),
    ],
)
def test_a_path_that_cannot_be_published_is_refused_before_anything_is_sent(tmp_path, make, said):
    with pytest.raises(InputError, match=said):
        files_in([make(tmp_path)])


def test_pages_and_pdf_files_are_sent_as_they_are(tmp_path):
    """They become text where they are indexed, so that what was sent can be read again by a better extractor."""
    (tmp_path / "a.html").write_text("<title>A page</title><p>text</p>")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 \xff")
    page, pdf = (event_of(read(file, tmp_path)[0]) for file in files_in([tmp_path]))
    assert (page.content_type.value, page.title) == ("html", None)
    assert (pdf.content_type.value, pdf.content, pdf.title) == ("pdf", "JVBERi0xLjQg/w==", "b")


def test_a_line_may_refer_to_its_content(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps({"doc_id": "one", "uri": "s3://b/k", "sha256": "0" * 64, "content_type": "pdf"}))
    event = event_of(read(file, tmp_path)[0])
    assert (event.deletes, event.uri, event.source_sha256) == (False, "s3://b/k", "0" * 64)
