"""Rows on disk: exact, bounded, and never half of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine import KvRows
from engine.model import Model
from quality.neighbours import Corpus
from quality.questions import Passage
from quality.row_cache import RowCache
from tests.engine.conftest import random_ids
from tests.quality.conftest import TEXTS, embed


def rows_of(model: Model, n: int) -> KvRows:
    return model.prefill_chunks((5,), [random_ids(n, seed=n)])[0]


def refuse() -> KvRows:
    raise AssertionError("it was computed again")


def test_rows_come_back_bit_for_bit(model: Model, tmp_path: Path) -> None:
    rows = rows_of(model, 7)
    RowCache(tmp_path, 1 << 20, model.fingerprint).rows("a", lambda: rows)
    again = RowCache(tmp_path, 1 << 20, model.fingerprint).rows("a", refuse)
    assert torch.equal(again.k, rows.k)
    assert torch.equal(again.v, rows.v)


def test_tensors_too(model: Model, tmp_path: Path) -> None:
    given = torch.randn(3, 5)
    cache = RowCache(tmp_path, 1 << 20, model.fingerprint)
    cache.tensor("t", lambda: given)
    assert torch.equal(cache.tensor("t", lambda: given * 0), given)


def test_kv_06_dep_03_the_folder_stays_within_its_bytes_and_what_was_read_stays(model: Model, tmp_path: Path) -> None:
    """An evaluation of a large corpus once filled the disk. What the file system says of reads decides nothing."""
    size = sum(part.nbytes for part in rows_of(model, 10).to_bytes())
    cache = RowCache(tmp_path, 3 * size, model.fingerprint)
    for number, name in enumerate("abc"):
        cache.rows(name, lambda: rows_of(model, 10))
        os.utime(tmp_path / f"{name}.rows", (9 - number, number))  # long ago, one after the other; read the other way
    cache.rows("a", refuse)
    cache.rows("d", lambda: rows_of(model, 10))
    assert {file.stem for file in tmp_path.iterdir()} == {"a", "c", "d"}
    again = RowCache(tmp_path, 2 * size, model.fingerprint)  # a smaller bound holds with the next write
    again.rows("e", lambda: rows_of(model, 10))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * size
    assert again.has("e")


def test_kv_06_what_a_killed_run_left_counts_and_goes_first(model: Model, tmp_path: Path) -> None:
    """Bug: the torn file of a killed evaluation was neither counted nor ever removed."""
    size = sum(part.nbytes for part in rows_of(model, 10).to_bytes())
    torn = tmp_path / "tmpkilled.part"
    torn.write_bytes(bytes(size))
    os.utime(torn, (0, 0))
    cache = RowCache(tmp_path, 2 * size, model.fingerprint)
    for name in "ab":
        cache.rows(name, lambda: rows_of(model, 10))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * size
    assert {file.name for file in tmp_path.iterdir()} == {"a.rows", "b.rows"}


def test_what_is_larger_than_the_bound_is_computed_and_not_kept(model: Model, tmp_path: Path) -> None:
    cache = RowCache(tmp_path, 10, model.fingerprint)
    assert cache.rows("a", lambda: rows_of(model, 4)).n_tokens == 4
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tensor_is_computed_again(model: Model, tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY torn")
    cache = RowCache(tmp_path, 1 << 20, model.fingerprint)
    assert torch.equal(cache.tensor("t", lambda: torch.ones(2)), torch.ones(2))
    assert torch.equal(cache.tensor("t", lambda: torch.zeros(2)), torch.ones(2))


def passages() -> list[Passage]:
    return [Passage(text, tuple(text.encode())) for text in TEXTS]


def test_the_nearest_are_others_the_nearest_first_and_embedded_once(model: Model, tmp_path: Path) -> None:
    """A chunk that is its own neighbour would be a copy of the prompt in front of itself."""
    cache = RowCache(tmp_path, 1 << 20, model.fingerprint)
    corpus = Corpus(passages(), lambda: (embed, "0" * 64), cache)
    bridge = corpus.passages[2]
    nearest = corpus.nearest(bridge.ids, 3)
    assert bridge not in nearest
    assert nearest[0].text in (TEXTS[0], TEXTS[4], TEXTS[1])
    scores = [
        float((embed([bridge.text])[0] @ embed([other.text])[0].T).item())
        / float(torch.tensor(embed([other.text])[0]).norm())
        for other in nearest
    ]
    assert scores == sorted(scores, reverse=True)
    assert len(corpus.nearest(bridge.ids, 99)) == 4

    def no_encoder(texts):
        raise AssertionError("embedded again")

    again = Corpus(passages(), lambda: (no_encoder, "0" * 64), cache)
    assert again.nearest(bridge.ids, 3) == nearest
    another = Corpus(passages(), lambda: (no_encoder, "1" * 64), cache)  # another encoder, other vectors
    with pytest.raises(AssertionError, match="embedded again"):
        another.nearest(bridge.ids, 3)
