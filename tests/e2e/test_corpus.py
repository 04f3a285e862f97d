"""Real documents: 60 web pages through the real topic, and questions about them."""

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(os.environ.get("KVQUILT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
CORPUS = HERE / "turborag_corpus_1200.jsonl"


@pytest.mark.skipif(not CORPUS.exists(), reason=f"{CORPUS.name} is not in {HERE}; KVQUILT_TEST_DATA names its folder")
def test_sixty_web_pages_are_ingested_and_answered_from(tmp_path, start_tiny):
    with CORPUS.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(60), strict=False)]
    events = tmp_path / "events.jsonl"
    with events.open("w") as file:
        for row in rows:
            file.write(json.dumps({"doc_id": row["id"], "content": row["text"], "version": 1}) + "\n")
    world = start_tiny(tmp_path / "data")
    told = world.kvquilt("publish", str(events), "--wait")
    assert (told["published"], told["servable"], told["refused"]) == (60, 60, {})

    found = 0
    for row in rows[:20]:
        answer = world.ask(row["question"], max_tokens=2)
        usage = answer["usage"]
        assert usage["reused_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
        assert {citation["source"] for citation in answer["citations"]} == {"cached"}
        found += row["id"] in {citation["doc_id"] for citation in answer["citations"]}
    assert found >= 16, f"the page that answers the question was among the sources for {found} of 20 questions"
