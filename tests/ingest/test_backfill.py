"""Backfill: files through the same transforms, on Beam's real runner."""

from dataclasses import replace

import pytest

from ingest import plan_prune, run_backfill
from ingest.formats import EventReader
from ingest.sources import survey
from ingest.sources.rows import FileState
from schemas.errors import InputError
from schemas.ids import packed_version
from schemas.settings import load_settings
from stores.fakes import with_faults
from stores.topics import read_all
from tests.ingest.backfilling import WRITTEN_S, backfill, jsonl, messages, parquet, written
from tests.ingest.formats_world import PDFS
from tests.ingest.tiny import make_tiny_model, text
from tests.ingest.world import document


def test_rows_of_both_kinds_become_servable_with_text_and_kv(world, tmp_path):
    lines = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(30)])
    table = parquet(
        tmp_path / "b.parquet",
        {"doc_id": "b0", "content": "row 0", "title": "A title", "metadata": {"team": "blue"}, "version": 7},
        {"doc_id": "b1", "content": "# row 1", "content_type": "markdown", "tenant": "other"},
    )
    done = backfill(world, lines, table)
    assert (done.total, done.indexed, done.committed, done.prefilled, done.dead) == (32, 32, 32, 32, 0)
    assert [world.texts(f"a{n}") for n in range(30)] == [f"line {n}" for n in range(30)]
    heads = world.qdrant.heads([document("b0"), document("b1", "other")])
    assert heads[document("b0")].title == "A title"
    assert heads[document("b0")].metadata == {"team": "blue"}
    assert heads[document("b0")].version == 7
    assert heads[document("b1", "other")].live
    world.assert_clean()


def test_a_second_run_embeds_prefills_and_puts_nothing(world, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(30)])
    counted = with_faults(world.kv)
    world.prefill_parts = replace(world.prefill_parts, kv=counted)

    def cost():
        return len(world.embedder.embedded), len(world.model.prefilled), counted.calls["put"]

    backfill(world, file)
    state = world.state()
    assert cost() == (30, 30, 30)
    done = backfill(world, file)
    assert (done.committed, done.repeated, done.dead) == (0, 30, 0)
    assert (world.state(), cost()) == (state, (30, 30, 30))


@pytest.mark.parametrize("live_first", [True, False])
def test_a_live_event_wins_over_the_file_whichever_is_read_first(world, tmp_path, live_first):
    """A backfill that wins by arrival brings back what was changed, or deleted, since the file was written."""
    file = jsonl(tmp_path / "a.jsonl", {"doc_id": "a", "content": "old a"}, {"doc_id": "b", "content": "old b"})
    if not live_first:
        backfill(world, file)
    world.change("new a", doc_id="a")
    world.change(None, doc_id="b")
    world.index()
    if live_first:
        assert backfill(world, file).superseded == 2
    world.prefill()
    assert (world.texts("a"), world.texts("b")) == ("new a", None)
    world.assert_clean()


def test_of_two_rows_of_a_document_the_later_one_wins(world, tmp_path):
    rows = [{"doc_id": "a", "content": f"text {n}"} for n in range(12)]
    backfill(world, jsonl(tmp_path / "a.jsonl", *rows))
    assert world.texts("a") == "text 11"
    assert world.qdrant.heads([document("a")])[document("a")].version == packed_version(WRITTEN_S * 1000, 11)
    world.assert_clean()


def test_a_bad_row_is_a_dead_letter_with_its_file_and_row(world, tmp_path):
    rows = [{"doc_id": "a", "content": "good"}, {"content": "no id"}, b"{broken\n", {"doc_id": "c", "content": None}]
    done = backfill(world, jsonl(tmp_path / "a.jsonl", *rows, {"doc_id": "b", "content": "good too"}))
    assert (done.committed, done.dead) == (2, 3)
    assert (world.texts("a"), world.texts("b")) == ("good", "good too")
    letters = {letter["offset"]: letter for letter in world.dead_letters()}
    assert letters.keys() == {"1", "2", "3"}
    assert {letter["topic"] for letter in letters.values()} == {"a.jsonl"}
    assert "no key" in letters["1"]["message"]
    assert "not JSON" in letters["2"]["message"]
    assert "content: Input should be a valid string" in letters["3"]["message"]


def test_a_column_that_is_no_field_is_named(world, tmp_path):
    file = parquet(tmp_path / "a.parquet", {"doc_id": "a", "content": "x", "author": "somebody"})
    assert backfill(world, file).dead == 1
    assert "author: Extra inputs are not permitted" in world.dead_letters()[0]["message"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.jsonl", "missing.jsonl does not exist"),
        ("missing.parquet", "missing.parquet does not exist"),
        ("a.csv", "a.csv ends in .csv; a backfill reads .md,"),
        ("bare", "bare ends in nothing"),
        ("torn.parquet", "torn.parquet cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_before_anything_is_done(tmp_path, name, said):
    for there in ("a.csv", "bare", "torn.parquet"):
        (tmp_path / there).write_text("a,b\n")
    with pytest.raises(InputError, match=said):
        survey([tmp_path / name])


def test_rows_are_read_as_messages(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", {"doc_id": "é", "content": "x"}, b"\n", {"doc_id": "b", "content": "y"})
    source = survey([file])
    first, second = messages(source)
    assert (first.topic, first.offset, first.timestamp_ms, first.key) == ("a.jsonl", 0, WRITTEN_S * 1000, "é".encode())
    assert (second.offset, second.key) == (1, b"b")
    assert source.n_rows == 2


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_pieces_of_a_large_file_give_the_rows_of_the_whole_with_their_numbers(tmp_path, write):
    """Bug: rows numbered by piece get the versions of other rows, and the wrong one of two wins."""
    rows = [{"doc_id": f"d{n}", "content": f"text {n}"} for n in range(600)]
    options = {"row_group_size": 250} if write is parquet else {}
    source = survey([write(tmp_path / f"a.{write.__name__}", *rows, **options)])
    assert len(source.pieces) == 3
    assert [(message.offset, message.key) for message in messages(source)] == [
        (n, f"d{n}".encode()) for n in range(600)
    ]


def test_rows_get_the_tenant_that_the_call_names_unless_they_name_one(world, tmp_path):
    rows = [{"doc_id": "a", "content": "x"}, {"doc_id": "b", "content": "y", "tenant": "other"}]
    backfill(world, jsonl(tmp_path / "a.jsonl", *rows), tenant="acme")
    assert {head.document for head in world.qdrant.documents()} == {document("a", "acme"), document("b", "other")}


def test_a_file_that_is_changed_between_the_survey_and_the_reading_stops_the_run(world, tmp_path):
    """Bug: places of rows in a file that was written anew point into the middle of other rows."""
    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": "x"} for n in range(3)])
    source = survey([file])
    file.write_text('{"doc_id": "other", "content": "something longer than before, and more of it"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl was changed while it was read; run the backfill again"):
        backfill(world, source=source)
    assert list(world.qdrant.documents()) == []


@pytest.mark.parametrize("n_rows", [3, 300])
def test_a_file_that_is_written_anew_while_its_rows_are_read_stops_the_run(tmp_path, n_rows):
    """Bug: where it became shorter, the reader waited for the missing rows for ever; else nobody noticed."""

    def rows(n, text):
        return [{"doc_id": f"a{number}", "content": text * 100} for number in range(n)]

    file = jsonl(tmp_path / "a.jsonl", *rows(200, "the old text "))
    (piece,) = survey([file]).pieces
    reading = piece.read()
    next(reading)
    jsonl(file, *rows(n_rows, "the new text, which is longer "))
    with pytest.raises(InputError, match=r"a\.jsonl was changed while it was read; run the backfill again"):
        list(reading)


def test_a_row_beyond_two_million_is_newer_than_the_rows_before_it(tmp_path):
    """Bug: a version holds 21 bits of the row's number, so the last row of such a file lost to an early one."""
    state = FileState.of(jsonl(tmp_path / "a.jsonl"))
    numbers = [0, 5, 2**21 - 1, 2**21, 2**21 + 3, 2**22, 2**31]
    messages = [state.message(number, b'{"doc_id": "a", "content": "x"}', "default") for number in numbers]
    versions = [EventReader().read(message).version for message in messages]
    assert versions == sorted(set(versions))
    assert [message.offset for message in messages] == numbers


def test_binary_columns_of_a_table_are_text_and_of_a_pdf_the_file(world, tmp_path):
    """Bug: content became what Python prints of bytes, b'...' with its escapes, and was served like that."""
    table = parquet(
        tmp_path / "a.parquet",
        {"doc_id": b"a", "content": "Café opens at 9.\nCloses at 5.".encode(), "title": "Café".encode()},
        {"doc_id": b"b", "content": PDFS["two pages"], "content_type": "pdf"},
        {"doc_id": b"c", "content": b"caf\xe9"},
        {"doc_id": b"d", "content": b"the last one"},
    )
    done = backfill(world, table)
    assert (done.committed, done.dead) == (3, 1)
    assert (world.texts("a"), world.texts("d")) == ("Café opens at 9.\nCloses at 5.", "the last one")
    assert "Annual leave" in world.texts("b")
    assert world.qdrant.heads([document("a")])[document("a")].title == "Café"
    (letter,) = world.dead_letters()
    assert (letter["topic"], letter["offset"]) == ("a.parquet", "2")
    assert "the value is not UTF-8: invalid continuation byte at byte" in letter["message"]


def test_a_table_with_a_damaged_page_is_named(tmp_path):
    """Bug: what is wrong inside a file that looked good was an error of the library, with no file's name."""
    table = parquet(tmp_path / "a.parquet", *[{"doc_id": f"a{n}", "content": f"text {n}"} for n in range(50)])
    (piece,) = survey([table]).pieces
    damaged = bytearray(table.read_bytes())
    damaged[4:200] = bytes(196)
    table.write_bytes(damaged)
    written(table)
    with pytest.raises(InputError, match=r"a\.parquet cannot be read"):
        list(piece.read())


@pytest.mark.slow
def test_run_backfill_with_real_models_and_a_real_topic(memory_broker, tmp_path):
    settings = load_settings(
        {
            "data_dir": str(tmp_path / "data"),
            "cache_dir": str(tmp_path / "cache"),
            "kafka": {"bootstrap": memory_broker.bootstrap, "documents_topic": "backfill", "commits_topic": "filled"},
            "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
            "chunker": {"max_tokens": 32},
        }
    )
    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": text(n)} for n in range(20)])
    told = []
    done = run_backfill(settings, survey([file]), told.append)
    assert (done.total, done.committed, done.prefilled, done.dead) == (20, 20, 20, 0)
    assert told[-1] == done, "who waits is told the same as Beam's metrics say"
    assert len(list(read_all(settings.kafka, "filled"))) == 20
    artifacts = set((tmp_path / "data" / "blobs").rglob("*.safetensors"))
    assert len(artifacts) >= 20
    assert run_backfill(settings, survey([file])).repeated == 20
    assert set((tmp_path / "data" / "blobs").rglob("*.safetensors")) == artifacts

    shorter = written(
        jsonl(file, *[{"doc_id": f"a{n}", "content": text(n), "version": 1} for n in range(15)]), WRITTEN_S + 1
    )
    source = survey([shorter])
    prune = plan_prune(settings, source, "default", ["*"])
    assert (len(prune.heads), prune.n_owned) == (5, 20)
    pruned = run_backfill(settings, source, prune=prune)
    assert (pruned.superseded, pruned.pruned) == (15, 5)
    assert len(set((tmp_path / "data" / "blobs").rglob("*.safetensors"))) < len(artifacts)
    assert plan_prune(settings, source, "default", ["*"]).heads == ()
