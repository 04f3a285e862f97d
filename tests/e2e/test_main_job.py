"""The main job on real parts: publish, ask, change, delete, through the real topic and the packaged models."""

import threading
import time

import pytest

from cli.publish import dead_letters
from stores import Publisher, lag

pytestmark = pytest.mark.slow

HUT = "# The hut\n\nThe key of the {name} hangs behind the stove. Its box opens with the code {code}.\n"


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
    return found


def cited(answer, doc_id):
    return [citation for citation in answer["citations"] if citation["doc_id"] == doc_id]


def test_up_says_once_when_all_is_ready_and_where_to_ask(world):
    """Bug: its last line was that it listens, which it says long before the model is loaded; then nothing more."""

    def said():
        return [line for line in world.up.log.read_text().splitlines() if line.startswith("ready: ")]

    until(said)
    world.service.check_ready()
    assert said() == [f"ready: ask at {world.running.url}, or with `kvquilt ask --url {world.running.url} QUESTION`"]


def test_a_published_document_is_answered_from_its_kv(world):
    told = world.publish("larch.md", HUT.format(name="Larch Hut", code="4719"), "--version", "1")
    assert (told["published"], told["servable"]) == (1, 1)
    answer = world.ask("Which code opens the box of the Larch Hut?", k=1, max_tokens=40)
    assert [citation["source"] for citation in cited(answer, "larch.md")] == ["cached"]
    assert "4719" in answer["answer"]
    usage = answer["usage"]
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    assert usage["reused_tokens"] > usage["fresh_tokens"]
    assert (answer["cache_mode"], answer["policy"], answer["fallback"]) == ("reuse", "none", {})


def test_one_stitched_chunk_answers_like_full_attention(world):
    world.publish("birch.md", HUT.format(name="Birch Hut", code="2206"), "--version", "1")
    question = {"question": "Which code opens the box of the Birch Hut?", "k": 1, "max_tokens": 40}
    answers = [world.service.post("/v1/answer", {**question, "cache_mode": mode}) for mode in ("exact", "reuse")]
    assert answers[0]["answer"] == answers[1]["answer"]
    assert [answer["cache_mode"] for answer in answers] == ["exact", "reuse"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_cap_03_after_an_update_is_committed_no_answer_cites_the_old_version(world):
    """Bug (messkan/prompt-cache#8): a time-to-live alone kept serving what had changed."""
    world.publish("alder.md", HUT.format(name="Alder Hut", code="1111"), "--version", "1")
    answers, stop = [], threading.Event()

    def keep_asking():
        while not stop.is_set():
            begun = time.monotonic()
            answers.append((begun, world.ask("Which code opens the box of the Alder Hut?", max_tokens=1)))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        until(lambda: answers)
        file = world.folder / "files" / "alder.md"
        file.write_text(HUT.format(name="Alder Hut", code="2222"))
        world.kvquilt("publish", str(file), "--root", str(file.parent), "--version", "2")
        until(lambda: world.service.status("alder.md")["version"] == 2)
        committed = time.monotonic()
        until(lambda: sum(begun > committed for begun, _ in answers) >= 3)
    finally:
        stop.set()
        asking.join()
    after = [answer for begun, answer in answers if begun > committed]
    assert all(citation["version"] == 2 for answer in after for citation in cited(answer, "alder.md"))
    assert all("2222" in cited(answer, "alder.md")[0]["text"] for answer in after)
    versions = {citation["version"] for _, answer in answers for citation in cited(answer, "alder.md")}
    assert versions == {1, 2}, "before the commit the old version answers: the document is never gone"
    final = world.ask("Which code opens the box of the Alder Hut?", k=1, max_tokens=40)
    assert "2222" in final["answer"]
    assert "1111" not in final["answer"]


def test_after_a_delete_none_cites_the_document_and_an_old_event_does_not_bring_it_back(world):
    world.publish("rowan.md", HUT.format(name="Rowan Hut", code="3333"), "--version", "5")
    assert cited(world.ask("Which code opens the box of the Rowan Hut?"), "rowan.md")
    world.kvquilt("doc", "delete", "rowan.md")
    until(lambda: world.kvquilt("doc", "status", "rowan.md")["state"] == "deleted")
    assert not cited(world.ask("Which code opens the box of the Rowan Hut?", k=64), "rowan.md")
    file = world.folder / "files" / "rowan.md"
    world.kvquilt("publish", str(file), "--root", str(file.parent), "--version", "4")
    until(lambda: lag(world.settings.kafka, "kvquilt.index", "documents") == 0)
    assert world.service.status("rowan.md")["state"] == "deleted"
    assert not cited(world.ask("Which code opens the box of the Rowan Hut?", k=64), "rowan.md")
    assert "no KV artifact" in world.kvquilt("kv", "inspect", "rowan.md", "--set", "model.dtype=float32", code=1)


def test_a_damaged_kv_file_is_a_miss_and_the_answer_is_the_same(world):
    """Bug (LMCache#4991): a torn file stayed readable, and answers were gibberish from then on."""
    world.publish("aspen.md", HUT.format(name="Aspen Hut", code="5150"), "--version", "1")
    question = "Which code opens the box of the Aspen Hut?"
    sound = world.ask(question, k=1, max_tokens=40)
    (artifact,) = world.kvquilt("kv", "inspect", "aspen.md", "--set", "model.dtype=float32")["artifacts"]
    (file,) = world.folder.rglob(f"{artifact['key']}.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    damaged = world.ask(question, k=1, max_tokens=40)
    assert damaged["fallback"] == {"checksum": 1}
    assert [citation["source"] for citation in damaged["citations"]] == ["fresh"]
    assert damaged["answer"] == sound["answer"]


def test_a_bad_event_is_a_dead_letter_and_the_documents_around_it_are_served(world):
    kafka = world.settings.kafka
    with Publisher(kafka) as publisher:
        bad = [publisher.publish(kafka.documents_topic, b"bad", value) for value in (b"{", b'{"content": ""}')]
    world.publish("spruce.md", HUT.format(name="Spruce Hut", code="7777"), "--version", "1")
    at = {(message.partition, message.offset): f"event {number}" for number, message in enumerate(bad)}
    letters = until(lambda: found if len(found := dead_letters(kafka, at)) == 2 else None)
    assert "the value is not JSON" in letters["event 0"]
    assert "the document is empty" in letters["event 1"]
    assert cited(world.ask("Which code opens the box of the Spruce Hut?"), "spruce.md")


def test_publishing_a_file_that_the_ingest_would_refuse_exits_1_and_names_it(world):
    file = world.folder / "files" / "empty.md"
    file.write_text("   ")
    world.kvquilt("publish", str(file), "--root", str(file.parent), code=1)


def test_a_second_up_on_the_folder_is_refused_in_one_sentence(world):
    said = world.kvquilt("up", code=1)
    assert f"is in use by process {world.up.pid}" in said
    assert len(said.splitlines()) == 1


def test_doctor_finds_that_everything_works_and_warns_of_a_change_that_was_put_aside(world):
    """Bug: it said that all is well while documents were missing."""
    kafka = world.settings.kafka
    with Publisher(kafka) as publisher:
        bad = publisher.publish(kafka.documents_topic, b"bad", b"[")
    until(lambda: dead_letters(kafka, {(bad.partition, bad.offset): "it"}))
    told = world.kvquilt("doctor", "--set", "model.dtype=float32")
    assert (told["ok"], told["warnings"]) == (True, ["dead letters"]), told


def test_metrics_show_service_and_pipelines(world):
    metrics = world.service._answer("GET", "/metrics").text
    assert 'kvquilt_freshness_seconds_count{kind="kv"}' in metrics
    assert "kvquilt_reused_tokens_total" in metrics
    assert "kvquilt_kv_writes_total{" in metrics
    assert "kvquilt_kv_store_failures_total{" in metrics, "there from the start, before any failure"


def test_publish_that_waits_tells_of_what_is_newer_and_of_what_was_refused(world):
    """Bug: a change that was dropped for its version was reported as servable, with exit status 0."""
    world.publish("order/boat.txt", "The boat is red.", "--version", "10")
    older = world.publish("order/boat.txt", "The boat is blue.", "--version", "3")
    assert (older["servable"], older["superseded"]) == (0, {"order/boat.txt": 10})
    file = world.folder / "files" / "order" / "boat.txt"
    again = ("publish", str(file), "--root", str(world.folder / "files"), "--wait", "--version", "10")
    refused = world.kvquilt(*again, code=1)
    assert "version 10 was ingested before with other content" in refused["refused"]["order/boat.txt"]
    assert refused["servable"] == 0
