"""Deletion on real parts: by id and by metadata, the receipt, dead letters, the counters, and reconcile afterwards."""

import json
import time

import pytest

pytestmark = pytest.mark.slow


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
    return found


def metric(world, sample):
    import httpx

    lines = httpx.get(f"{world.running.url}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample + " "))


def test_vec_09_what_is_deleted_is_gone_from_every_store_and_the_receipt_says_so(start_tiny, tiny_model, tmp_path):
    """From the command line to the object store and back, over everything that `kvquilt up` runs."""
    world = start_tiny(tmp_path / "data")
    rows = [
        {"doc_id": f"hut {n}", "content": f"The key of hut {n} hangs behind the stove.", "metadata": {"team": team}}
        for n, team in enumerate(["blue", "blue", "red"])
    ]
    file = tmp_path / "huts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"doc_id": "hut 9", "content": "Doomed."}]))
    world.kvquilt("publish", str(file), "--wait")

    world.kvquilt("doc", "delete", "hut 9")
    listed = world.kvquilt("doc", "delete", "--filter", "team=blue")
    assert sorted(one["doc_id"] for one in listed["deletions"]) == ["hut 0", "hut 1"]
    for name in ("hut 9", "hut 0", "hut 1"):
        receipt = world.kvquilt("doc", "receipt", name, "--wait")
        assert receipt["state"] == "COMPLETE"
        counts = {count["place"]: (count["found"], count["deleted"], count["left"]) for count in receipt["counts"]}
        assert counts == {"vectors/index": (1, 1, 0), "kv/object": (1, 1, 0), "kv/fused": (0, 0, 0)}
        assert receipt["asked_ms"] <= receipt["invisible_ms"] <= receipt["complete_ms"]
    answer = world.ask("Where does the key of the hut hang?")
    assert [citation["doc_id"] for citation in answer["citations"]] == ["hut 2"]
    judged = [metric(world, f'kvquilt_deletions_total{{state="{state}"}}') for state in ("complete", "waiting")]
    assert sum(judged) == 3, "PREFILL closes a receipt, or leaves it to the replica that keeps KV in memory"
    assert metric(world, 'kvquilt_stale_served_total{kind="text"}') == 0
    assert "no deletion of document 'hut 2' is known" in world.kvquilt("doc", "receipt", "hut 2", code=1)

    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"doc_id": "hut 7", "content": "Version one.", "version": 1}) + "\n")
    world.kvquilt("publish", str(broken), "--wait")
    broken.write_text(json.dumps({"doc_id": "hut 7", "content": "Another version one.", "version": 1}) + "\n")
    world.kvquilt("publish", str(broken))
    (letter,) = until(lambda: world.kvquilt("dlq", "ls")["letters"])
    assert (letter["key"], letter["stage"]) == ("hut 7", "plan")
    assert world.kvquilt("dlq", "show", letter["id"])["message"].startswith("default/hut 7 version 1 was ingested")

    world.close()
    report = world.kvquilt("reconcile", "--set", f"model.name={tiny_model}", "--set", "model.dtype=float32")
    assert (report["settled"], report["findings"]) == (True, [])
    assert (report["documents"], report["points"], report["objects"], report["receipts"]) == (5, 2, 2, 3)
