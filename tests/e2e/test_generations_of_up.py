"""The same by the commands of one machine: `up`, `reindex`, `up` feeds both, `promote`, `up` serves the new one."""

import pytest

pytestmark = pytest.mark.slow


def test_up_feeds_both_generations_and_serves_the_one_that_was_promoted(start_tiny, tiny_model, tmp_path):
    """Bug: events that came between `reindex` and `promote` were in one generation only."""
    folder = tmp_path / "data"
    same = ("--set", f"model.name={tiny_model}", "--set", "model.dtype=float32")
    first = start_tiny(folder)
    first.publish("d0.txt", "The lamp in the hall is green. " * 20)
    old = first.service.get("/version")["generation"]
    assert "is in use by process" in first.kvquilt("promote", code=1)
    first.close()
    built = first.kvquilt("reindex", *same, "--set", "chunker.max_tokens=64")
    assert built["gap"] == "nothing is missing (documents compared: 1)"

    second = start_tiny(folder)
    assert second.service.get("/version")["generation"] == old
    second.publish("d1.txt", "The lamp in the attic is red.")
    second.close()
    promoted = second.kvquilt("promote", "--wait", "0")
    assert (promoted["live"], promoted["before"], promoted["complete"]) == (built["generation"], old, True)

    third = start_tiny(folder)
    assert third.service.get("/version")["generation"] == built["generation"]
    assert third.service.status("d0.txt")["chunks"] > 1, "chunks of 64 tokens at most"
    assert third.ask("What colour is the lamp?", max_tokens=2)["citations"]
    assert [one["state"] for one in third.kvquilt("generations")["generations"]] == ["standby", "live"]
