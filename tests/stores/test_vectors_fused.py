"""What a point says of its fused artifact, and finding it by its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schemas.chunk import Chunk, Fusion, IndexedChunk, Neighbour
from schemas.ids import DocumentKey
from stores.points import CHUNK_INDEXES

DOC, NEAR, FAR = (DocumentKey("acme", name) for name in ("a", "near", "far"))
FUSION = Fusion("fused-1", (Neighbour(NEAR, (1 << 62) + 1, "k1"), Neighbour(FAR, 2, "k2"), Neighbour(NEAR, 3, "k3")))


@pytest.fixture
def point(index):
    made = IndexedChunk(
        Chunk(DOC, 1, 0, "text", 0, 4, (1, 2)), "pass-1", np.ones((1, 8), np.float32), True, first_key="first"
    )
    index.upsert([made])
    return made


def read(index):
    (found,) = index.chunks(DOC)
    return found


def test_a_point_names_its_artifacts_and_its_neighbours(index, point):
    assert read(index).fusion is None
    assert read(index).kv_keys == ("pass-1", "first")
    index.mark_fusion(point.chunk.id, FUSION)
    assert read(index).fusion == FUSION
    assert read(index).kv_keys == ("pass-1", "first", "fused-1")
    index.mark_fusion(point.chunk.id, None)
    assert read(index).fusion is None


def test_upserting_takes_the_fusion_with_it(index, point):
    """An unchanged chunk of a new version keeps its fused artifact."""
    index.upsert([replace(point, fusion=replace(FUSION, ready=True))])
    assert read(index).fusion == replace(FUSION, ready=True)


def test_it_is_found_by_each_neighbour_and_by_no_other_document(index, point):
    index.mark_fusion(point.chunk.id, FUSION)
    for document, n_found in ((NEAR, 1), (FAR, 1), (DOC, 0), (DocumentKey("other", "near"), 0)):
        assert [found.chunk.id for found in index.fused_with(document)] == [point.chunk.id] * n_found
    index.mark_fusion(point.chunk.id, None)
    assert index.fused_with(NEAR) == []
    assert "neighbours" in CHUNK_INDEXES, "a filter over all points of a large corpus wants an index"


def test_a_late_mark_does_not_undo_a_newer_one(index, point):
    """Two runs: one forgets an artifact that the other has replaced meanwhile."""
    newer = Fusion("fused-2", FUSION.neighbours)
    index.mark_fusion(point.chunk.id, newer)
    index.mark_fusion(point.chunk.id, None, was=FUSION)
    assert read(index).fusion == newer
    index.mark_fusion(point.chunk.id, replace(newer, ready=True), was=newer)
    assert read(index).fusion == replace(newer, ready=True)


def test_marking_does_not_bring_a_deleted_point_back(index, point):
    index.delete([point.chunk.id])
    index.mark_fusion(point.chunk.id, FUSION)
    assert index.chunks(DOC) == []
    assert index.fused_with(NEAR) == []
