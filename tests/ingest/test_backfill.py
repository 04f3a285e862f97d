"""Backfill: files through the same transforms, on Beam's real runner."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from ingest import run_backfill
from ingest.backfill import Backfill, Tally, count_rows, read_rows
from ingest.handles import held
from ingest.run import run_pipeline
from schemas.errors import InputError
from schemas.ids import packed_version
from schemas.settings import load_settings
from stores.topics import read_all
from tests.ingest.tiny import make_tiny_model, text
from tests.ingest.world import document

WRITTEN_S = 1_600_000_000  # when the files of these tests were changed


def jsonl(path, *rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    os.utime(path, (WRITTEN_S, WRITTEN_S))
    return path


def parquet(path, *rows):
    columns = {name: None for row in rows for name in row}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | row for row in rows]), path)
    os.utime(path, (WRITTEN_S, WRITTEN_S))
    return path


def backfill(world, *paths):
    tally = Tally(sum(count_rows(path) for path in paths), None)
    with held(world.index_parts) as index, held(world.prefill_parts) as prefill, held(tally) as handle:
        run_pipeline(lambda p: p | Backfill(world.settings.ingest, paths, index, prefill, handle))
    return tally.now


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


def test_a_second_run_does_nothing(world, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(30)])
    backfill(world, file)
    state, embedded, prefilled = world.state(), len(world.embedder.embedded), len(world.model.prefilled)
    done = backfill(world, file)
    assert (done.committed, done.repeated, done.dead) == (0, 30, 0)
    assert (world.state(), len(world.embedder.embedded), len(world.model.prefilled)) == (state, embedded, prefilled)


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
    ("name", "message"),
    [("missing.jsonl", "cannot be read"), ("missing.parquet", "cannot be read"), ("a.csv", "neither .jsonl nor")],
)
def test_a_file_that_cannot_be_read_is_refused_before_anything_is_done(tmp_path, name, message):
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=message):
        count_rows(tmp_path / name)


def test_rows_are_read_as_messages(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", {"doc_id": "é", "content": "x"}, b"\n", {"doc_id": "b", "content": "y"})
    first, second = read_rows(str(file))
    assert (first.topic, first.offset, first.timestamp_ms, first.key) == ("a.jsonl", 0, WRITTEN_S * 1000, "é".encode())
    assert (second.offset, second.key) == (1, b"b")
    assert count_rows(file) == 2


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
    done = run_backfill(settings, [file], told.append)
    assert (done.total, done.committed, done.prefilled, done.dead) == (20, 20, 20, 0)
    assert told[-1] == done
    assert len(list(read_all(settings.kafka, "filled"))) == 20
    artifacts = set((tmp_path / "data" / "blobs").rglob("*.safetensors"))
    assert len(artifacts) >= 20
    assert run_backfill(settings, [file]).repeated == 20
    assert set((tmp_path / "data" / "blobs").rglob("*.safetensors")) == artifacts
