"""Fused artifacts: served only while every neighbour is visible at the version that was used, else pass 1, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.variants import VARIANTS
from schemas.chunk import Fusion, Neighbour
from schemas.head import DocumentState
from schemas.ids import DocumentKey
from serve.forms import served_variant, wanted
from tests.serve.fakes import certificate, metric

ASK = {"question": "How deep is the lake?", "k": 3}


def ask(client, **fields):
    return client.post("/v1/answer", json=ASK | fields).json()


def read_keys(bench):
    return ["fused" if "/fused" in path else "pass 1" for path in bench.blobs.reads]


def test_the_first_chunk_is_served_from_pass_1_and_the_others_fused(client, fused):
    """Right behind the prefix the rows of pass 1 are exact; fused ones saw something else in front."""
    body = ask(client)
    assert sorted(read_keys(fused)) == ["fused", "fused", "pass 1"]
    assert body["fallback"] == {}
    assert {citation["source"] for citation in body["citations"]} == {"cached"}


@pytest.mark.parametrize("change", ["changed", "deleted"])
def test_a_neighbour_that_is_not_visible_any_more_speaks_through_nobodys_rows(client, fused, change):
    """Between the flip and the cleaning up the artifact is there, sound, and holds a deleted document's influence."""
    state = DocumentState.DELETED if change == "deleted" else DocumentState.LIVE
    fused.corpus.flip("near", 2, state=state, n_chunks=0)
    body = ask(client)
    assert read_keys(fused) == ["pass 1"] * 3
    assert body["fallback"] == {"neighbour": 2}
    assert {citation["source"] for citation in body["citations"]} == {"cached"}, "pass 1 serves: nothing is computed"
    assert metric(client, 'kvquilt_fallback_total{reason="neighbour"}') == 2


def test_a_neighbour_of_which_no_head_is_left_counts_as_gone(client, fused):
    lost = Fusion("fused-x", (Neighbour(DocumentKey("default", "never was"), 1, "k"),), ready=True)
    for chunk in fused.parts.index.chunks(DocumentKey("default", "lake")):
        fused.parts.index.mark_fusion(chunk.chunk.id, lost)
    assert ask(client)["fallback"] == {"neighbour": 2}


def test_an_artifact_that_is_not_ready_is_not_asked_for(client, fused):
    for chunk in fused.parts.index.chunks(DocumentKey("default", "lake")):
        fused.parts.index.mark_fusion(chunk.chunk.id, replace(chunk.fusion, ready=False))
    body = ask(client)
    assert read_keys(fused) == ["pass 1"] * 3
    assert body["fallback"] == {}, "not fused yet is nothing that went wrong"


def test_a_fused_artifact_that_vanished_leaves_its_chunk_to_pass_1(client, fused):
    """It was invalidated between the reading of the heads and the loading."""
    keys = [chunk.fusion.kv_key for chunk in fused.parts.index.chunks(DocumentKey("default", "lake"))]
    fused.parts.kv.delete(DocumentKey("default", "lake"), keys)
    body = ask(client)
    assert body["fallback"] == {"missing": 2}
    assert {citation["source"] for citation in body["citations"]} == {"cached"}


def test_rows_that_were_fused_with_others_than_the_point_says_are_refused(client, fused):
    """Whose influence they hold is not known, so whether it is visible is not either."""
    for chunk in fused.parts.index.chunks(DocumentKey("default", "lake")):
        others = (replace(chunk.fusion.neighbours[0], kv_key="another"),)
        fused.parts.index.mark_fusion(chunk.chunk.id, replace(chunk.fusion, neighbours=others))
    assert ask(client)["fallback"] == {"fingerprint": 2}


def test_blend_spends_what_is_certified_for_the_rows_that_are_really_served(client, fused):
    """Numbers of fused rows say nothing about a prompt of rows of pass 1."""
    rows = [("fused", "none", 0.0, 0.01), ("shared_prefix", "closure", 0.2, 0.04)]
    fused.certificates.append(certificate(*rows))
    body = ask(client, cache_mode="blend")
    assert (body["cache_mode"], body["policy"], body["budget"]) == ("blend", "none", 0.0)
    fused.corpus.flip("near", 2)
    body = ask(client, cache_mode="blend")
    assert (body["policy"], body["budget"], body["fallback"]) == ("closure", 0.2, {"neighbour": 2})


def test_a_policy_is_told_of_the_rows_that_are_really_served(client, fused):
    """Bug: it chose as for fused rows among rows of pass 1, which is not what their certificate was measured with."""
    fused.certificates.append(certificate(("fused", "closure", 0.1, 0.01), ("shared_prefix", "closure", 0.2, 0.04)))
    ask(client, cache_mode="blend")
    fused.corpus.flip("near", 2)
    ask(client, cache_mode="blend")
    assert fused.model.selected_as_fused == [True, False]


def test_blend_is_exact_where_only_fused_rows_are_certified_and_one_is_not(client, fused):
    fused.certificates.append(certificate(("fused", "none", 0.0, 0.01)))
    fused.corpus.flip("near", 2)
    body = ask(client, cache_mode="blend")
    assert (body["cache_mode"], body["usage"]["repaired_tokens"]) == ("exact", 0)
    assert "with rows of variant shared_prefix" in body["note"]
    assert {citation["source"] for citation in body["citations"]} == {"fresh"}


def test_fresh_chunks_are_computed_behind_what_their_artifacts_were(client, bench):
    """An answer must not depend on what happened to be stored."""
    bench.corpus.put("lake", "The lake is deep.", kv=False)
    ask(client)
    object.__setattr__(bench.parts, "front_ids", (1, 2, 3, 9, 9))
    object.__setattr__(bench.parts, "variant", VARIANTS["company"])
    ask(client)
    object.__setattr__(bench.parts, "variant", VARIANTS["fused_company"])
    ask(client)
    assert bench.model.fronts == [[(1, 2, 3)], [(1, 2, 3, 9, 9)], [(1, 2, 3)]]


def test_the_variant_with_two_kinds_of_pass_1_serves_the_first_place_from_its_own(fused):
    chunk = fused.parts.index.chunks(DocumentKey("default", "lake"))[0]
    chunk = replace(chunk, first_key="behind the prefix")
    variant = VARIANTS["fused_company"]
    assert [form.kv_key for form in wanted(chunk, 0, variant, True).forms] == ["behind the prefix"]
    assert [form.kv_key for form in wanted(chunk, 1, variant, True).forms] == [chunk.fusion.kv_key, chunk.kv_key]
    assert served_variant(variant, [False, True, True]) == "fused_company"
    assert served_variant(variant, [False, True, False]) == "company"
    assert served_variant(VARIANTS["bos"], [False, False]) == "bos"
