"""Several processes of one pipeline in one group: they share, one dies, one is stopped and comes back, one leaves."""

import signal
import time

import apache_beam as beam
import pytest

from bench.member import Members
from ingest.fake_parts import fake_index_parts, fake_prefill_parts
from ingest.handles import held
from ingest.pipeline import IndexDocuments
from ingest.run import run_pipeline
from schemas.events import EventBody
from schemas.ids import DocumentKey
from schemas.settings import Settings
from stores.index_server import IndexServer
from stores.memory_index import MemoryIndex
from stores.topics import PartitionReader, Publisher, ensure_topics, read_all
from tests.services.fixtures import kafka_settings

TAKE_OVER_S = 30  # what is promised
PATIENCE_S = 90
N = 200  # documents

pytestmark = [pytest.mark.service, pytest.mark.slow]


class Site:
    """What all processes share: topics, an index, a folder of objects."""

    def __init__(self, kafka, folder, index, address):
        self.kafka, self.folder, self.index, self.address = kafka, folder, index, address
        self.settings = Settings(kafka=kafka, data_dir=folder)
        self.published = 0
        self.readers = {}

    def publish(self, n):
        items = [
            (b"doc %d" % k, EventBody(content=f"text number {k}", version=1).to_bytes(), ())
            for k in range(self.published, self.published + n)
        ]
        self.published += n
        with Publisher(self.kafka) as publisher:
            publisher.publish_many(self.kafka.documents_topic, items)

    def topic_of(self, pipeline):
        return self.kafka.documents_topic if pipeline == "index" else self.kafka.commits_topic

    def reader(self, pipeline):
        """One connection for all the asking: opening one costs more than what is asked."""
        if pipeline not in self.readers:
            group = self.kafka.group_of(pipeline)
            self.readers[pipeline] = PartitionReader(self.kafka, self.topic_of(pipeline), group)
        return self.readers[pipeline]

    def committed(self, pipeline):
        return self.reader(pipeline).committed()

    def lag(self, pipeline):
        reader = self.reader(pipeline)
        while reader.poll(500, 0.2) or reader.lag() is None:  # its highwater is as old as what it read last
            pass
        committed = reader.committed()
        return sum(end - committed.get(partition, 0) for partition, end in reader.highwater().items())

    def close(self):
        for reader in self.readers.values():
            reader.close()

    def done(self, pipeline):
        """How many documents are as they should be after it."""
        if pipeline == "index":
            return sum(1 for _ in self.index.documents())
        return sum(1 for _ in self.folder.rglob("*.safetensors"))  # documents of one chunk


@pytest.fixture
def site(apache_kafka, request, tmp_path):
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    kafka = kafka.model_copy(update={"session_timeout_s": 6.0, "partitions": 4})
    ensure_topics(kafka)
    index = MemoryIndex()
    with IndexServer(index) as server:
        site = Site(kafka, tmp_path, index, server.address)
        yield site
        site.close()


def members(site, pipeline):
    """Two processes, both of them reading; their model takes its time."""
    return Members(pipeline, 2, site.kafka, site.folder, site.address, 0.02, batch_documents=4)


def until(condition, what, patience_s=PATIENCE_S):
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"after {patience_s} s still not: {what}"
        time.sleep(0.3)


def prepare(site, pipeline, n):
    """`n` documents are in the topic that the pipeline reads."""
    new = {b"doc %d" % k for k in range(site.published, site.published + n)}
    site.publish(n)
    if pipeline == "prefill":
        messages = [m for m in read_all(site.kafka, site.kafka.documents_topic) if m.key in new]
        with held(fake_index_parts(site.settings, site.index)) as parts:
            run_pipeline(lambda p: p | beam.Create(messages) | IndexDocuments(site.settings.ingest, parts))
            parts().publisher.close()


def assert_exactly_right(site, pipeline):
    """Every document once, in its version, with all of its points; their KV too behind PREFILL; all is committed."""
    heads = {head.doc_id: head for head in site.index.documents()}
    assert heads.keys() == {f"doc {k}" for k in range(site.published)}
    parts = fake_prefill_parts(site.settings, site.index)
    for k in range(site.published):
        key = DocumentKey("default", f"doc {k}")
        points = site.index.chunks(key)
        assert (heads[f"doc {k}"].version, len(points)) == (1, heads[f"doc {k}"].n_chunks)
        assert " ".join(point.chunk.text for point in points) == f"text number {k}"
        if pipeline == "prefill":
            assert {key for point in points for key in point.kv_keys} == set(parts.kv.keys(key))
    if pipeline == "index":
        announced = {message.key for message in read_all(site.kafka, site.kafka.commits_topic)}
        assert len(announced) == site.published
    assert list(read_all(site.kafka, site.kafka.dead_letter_topic)) == []
    parts.publisher.close()
    assert site.lag(pipeline) == 0


@pytest.mark.parametrize("pipeline", ["index", "prefill"])
def test_ing_06_ing_09_kill_9_in_the_middle_and_the_other_process_takes_over(site, pipeline):
    """Fewer workers than before must not mean fewer documents; its partitions must not wait for an operator."""
    with members(site, pipeline) as processes:
        killed, other = processes.pids
        prepare(site, pipeline, N)
        until(lambda: site.done(pipeline) > N // 4, "a quarter of it")
        processes.signal(killed, signal.SIGKILL)
        at_the_kill = site.committed(pipeline)
        assert site.done(pipeline) < N
        assert processes.ended() == (killed, -signal.SIGKILL)

        def moved_or_done():
            now = site.committed(pipeline)
            return site.lag(pipeline) == 0 or all(now.get(p, 0) > at_the_kill.get(p, 0) for p in range(4))

        until(moved_or_done, "its partitions are read by the other", TAKE_OVER_S)
        until(lambda: site.lag(pipeline) == 0, "everything is done")
        assert_exactly_right(site, pipeline)
        processes.signal(other, signal.SIGTERM)
        assert processes.ended() == (other, 0)


@pytest.mark.parametrize("pipeline", ["prefill"])
def test_ing_13_a_process_that_is_stopped_and_comes_back_moves_no_offset_back(site, pipeline):
    """It finishes effects of partitions that others have by then, and may not commit them; it is used again after."""
    with members(site, pipeline) as processes:
        zombie, other = processes.pids
        prepare(site, pipeline, N)
        until(lambda: site.done(pipeline) > N // 4, "a quarter of it")
        processes.signal(zombie, signal.SIGSTOP)
        until(lambda: site.lag(pipeline) == 0, "the other does all of it")
        after = site.committed(pipeline)
        processes.signal(zombie, signal.SIGCONT)
        prepare(site, pipeline, 20)
        processes.signal(other, signal.SIGTERM)  # leaves: what is left is for the one that came back
        assert processes.ended() == (other, 0)
        until(lambda: site.lag(pipeline) == 0 and site.done(pipeline) == N + 20, "the rest", TAKE_OVER_S)
        assert all(site.committed(pipeline)[p] >= offset for p, offset in after.items())
        assert_exactly_right(site, pipeline)
        processes.signal(zombie, signal.SIGTERM)
        assert processes.ended() == (zombie, 0)
