"""The real graph on Beam's real runner, fed by a real broker."""

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace

import apache_beam as beam
import pytest

from ingest.batching import Waves
from ingest.handles import held
from ingest.pipeline import IndexDocuments, PrefillDocuments
from ingest.planning import parse
from ingest.run import run_pipeline
from ingest.source import Feed, ReadMessages
from ingest.supervisor import Progress, run_rounds
from schemas.errors import VectorIndexError
from stores.fakes import CrashPoint, with_faults
from stores.topics import ensure_topics, lag, read_all
from tests.ingest.world import World, document
from tests.services.fixtures import kafka_settings

WAIT_S = 60


@pytest.fixture(params=["memory_broker", pytest.param("apache_kafka", marks=pytest.mark.service)])
def streaming(request):
    """A world whose topics are real; `running` runs both pipelines over it."""
    world = World()
    bootstrap = request.getfixturevalue(request.param).bootstrap
    world.connect(kafka_settings(bootstrap, request.node.nodeid))
    ensure_topics(world.kafka)
    yield world
    world.publisher.close()
    world.close()


@dataclass
class Seen:
    """What became of the pipelines: rounds of INDEX, and errors that ended either."""

    rounds: int = 0
    failures: list = field(default_factory=list)


@contextlib.contextmanager
def running(world, **changes):
    """Both pipelines, until the block ends; then they drain."""
    ingest = world.settings.ingest.model_copy(update={"poll_s": 0.05, **changes})
    stop, seen = threading.Event(), Seen()

    def pipeline(name, topic, transform):
        try:
            with held(Progress()) as progress, Feed(world.kafka, topic, f"{world.kafka.group}.{name}", stop) as feed:

                def run():
                    seen.rounds += name == "index"
                    feed.start_round(ingest.round_bundles, ingest.round_s)
                    run_pipeline(lambda p: p | ReadMessages(feed) | transform(ingest, progress))

                run_rounds(name, run, progress(), ingest, stop)
        except BaseException as error:
            seen.failures.append(error)
            raise

    with held(world.index_parts) as index, held(world.prefill_parts) as prefill:
        threads = [
            threading.Thread(target=pipeline, args=(name, topic, transform))
            for name, topic, transform in [
                ("index", world.kafka.documents_topic, lambda i, p: IndexDocuments(i, index, p)),
                ("prefill", world.kafka.commits_topic, lambda i, p: PrefillDocuments(i, prefill, p)),
            ]
        ]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
            assert not any(thread.is_alive() for thread in threads), "drained"


def until(condition):
    """Wait until `condition` holds; fails after a minute."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.02)


def servable(world, doc_id):
    points = world.qdrant.chunks(document(doc_id))
    return bool(points) and all(point.kv_ready for point in points)


def test_ing_01_three_messages_become_servable_while_the_topic_stays_open(streaming):
    """The old local runner never ended a bundle of a streaming read: nothing came out until the end of time."""
    with running(streaming):
        for n in range(3):
            streaming.change(f"text number {n}", 1, doc_id=f"doc {n}")
        until(lambda: all(servable(streaming, f"doc {n}") for n in range(3)))
    streaming.assert_clean()


def test_ing_03_five_events_for_two_keys_all_come_through_while_the_topic_stays_open(streaming):
    """A grouping step after an unbounded read that never fires swallows them."""
    with running(streaming):
        for version, doc_id in [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a")]:
            streaming.change(f"{doc_id} in version {version}", version, doc_id=doc_id)
        until(lambda: (streaming.texts("a"), streaming.texts("b")) == ("a in version 3", "b in version 2"))
        until(lambda: servable(streaming, "a") and servable(streaming, "b"))


def test_ing_08_after_a_drain_nothing_is_read_twice_and_nothing_is_missing(streaming):
    """Where the last batch's offset is not committed, a restart repeats it; where it is too early, it is lost."""
    for n in range(20):
        streaming.change(f"text number {n}", 1, doc_id=f"doc {n}")
    with running(streaming):
        until(lambda: sum(servable(streaming, f"doc {n}") for n in range(20)) >= 5)
    for n in range(20, 40):
        streaming.change(f"text number {n}", 1, doc_id=f"doc {n}")
    with running(streaming):
        until(lambda: all(servable(streaming, f"doc {n}") for n in range(40)))
    streaming.assert_clean()
    assert len(streaming.embedder.embedded) == 40
    assert len(streaming.model.prefilled) == 40
    for name, topic in (("index", streaming.kafka.documents_topic), ("prefill", streaming.kafka.commits_topic)):
        assert lag(streaming.kafka, f"{streaming.kafka.group}.{name}", topic) == 0


def test_rounds_lose_nothing(streaming):
    """The runner is drained and started again every few bundles: its leak must not become a gap."""
    with running(streaming, round_bundles=3) as seen:
        for n in range(30):
            streaming.change(f"text number {n}", 1, doc_id=f"doc {n}")
        until(lambda: all(servable(streaming, f"doc {n}") for n in range(30)))
        until(lambda: seen.rounds >= 3)
    streaming.assert_clean()
    assert len(streaming.embedder.embedded) == 30


def test_ing_10_offsets_are_committed_without_waiting_for_the_drain(streaming):
    """A backlog that grows because commits come late is read again after the next crash."""
    with running(streaming):
        for n in range(10):
            streaming.change(f"text number {n}", 1, doc_id=f"doc {n}")
        until(lambda: lag(streaming.kafka, f"{streaming.kafka.group}.index", streaming.kafka.documents_topic) == 0)
        assert len(streaming.embedder.embedded) == 10


def test_an_outage_longer_than_the_retries_restarts_the_round(streaming):
    down = CrashPoint("flip", fault=VectorIndexError("Qdrant is down"), times=4)  # three attempts, then the round ends
    streaming.index_parts = replace(streaming.index_parts, index=with_faults(streaming.qdrant, down))
    streaming.change("a text", 1)
    with running(streaming) as seen:
        until(lambda: servable(streaming, "d"))
    assert seen.failures == []
    assert list(read_all(streaming.kafka, streaming.kafka.dead_letter_topic)) == []


def test_a_bad_event_on_a_real_topic_is_put_aside(streaming):
    streaming.raw(b"{", b"bad")
    streaming.change("a text", 1)
    with running(streaming):
        until(lambda: servable(streaming, "d"))
        until(lambda: list(read_all(streaming.kafka, streaming.kafka.dead_letter_topic)))
    (letter,) = read_all(streaming.kafka, streaming.kafka.dead_letter_topic)
    assert (letter.key, letter.value) == (b"bad", b"{")
    assert b"not JSON" in letter.header("kvquilt.error.message")


def test_the_graph_has_nothing_that_holds_elements_back(world):
    """A shuffle, a grouping or a flatten between source and sink would lose what it holds: offsets are committed."""
    pipeline = beam.Pipeline()
    with held(world.index_parts) as index, held(world.prefill_parts) as prefill:
        messages = pipeline | beam.Create([])
        first = pipeline.to_runner_api().components.transforms.keys()
        messages | IndexDocuments(world.settings.ingest, index)
        messages | PrefillDocuments(world.settings.ingest, prefill)
        transforms = pipeline.to_runner_api().components.transforms
    urns = {proto.spec.urn for name, proto in transforms.items() if name not in first and not proto.subtransforms}
    assert urns == {"beam:transform:pardo:v1"}


def test_waves_keep_the_order_of_a_document(world):
    messages = [world.change(f"{version}", version, doc_id=doc_id) for doc_id, version in
                [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2), ("c", 1)]]  # fmt: skip
    waves = Waves()
    for message in [*messages, world.raw(b"{")]:
        waves.add(parse(world.index_parts, message))
    assert waves.n_elements == 7
    drained = [[(w.event.doc_id, w.event.version) if w.event else "dead" for w in wave] for wave in waves.drain()]
    assert drained == [[("a", 1), ("b", 1), ("c", 1), "dead"], [("a", 2), ("b", 2)], [("a", 3)]]
    assert waves.drain() == []
