"""kill -9 at random moments: every document is servable, exactly once, and what was deleted stays deleted."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from engine import resolve_generation
from schemas.events import VERSION_HEADER, EventBody
from schemas.ids import DocumentKey
from schemas.settings import load_settings
from stores.blobs import open_blobs
from stores.kv_store import KvStore
from stores.topics import Publisher, ensure_topics, lag, read_all
from stores.vectors import open_index
from tests.ingest.tiny import make_tiny_model, text
from tests.services.fixtures import kafka_settings

KILLS, DOCUMENTS = 20, 300
WAIT_S = 150


class Zygote:
    """See tests/ingest/zygote.py."""

    def __init__(self, settings_file, errors):
        command = [sys.executable, "-m", "tests.ingest.zygote", str(settings_file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert self._process.stdout.readline() == "ready\n"

        self._child = None

    def start(self):
        """A process that ingests."""
        self._child = self._ask("start")

    def end(self, number):
        """Send a signal to it; gives its exit code."""
        os.kill(self._child, number)
        pid, self._child = self._child, None
        return self._ask(f"wait {pid}")

    def _ask(self, request):
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self):
        if self._child is not None:
            self.end(signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def events():
    """300 documents in slices, one per life; some are changed, some deleted in later slices. And what is to be left."""
    slices, final = [], {}
    for n in range(KILLS):
        names = [f"doc-{n * 15 + i}" for i in range(DOCUMENTS // KILLS)]
        events = [(name, 1, text(name_seed(name), 2)) for name in names]
        if n >= 2:
            events += [(f"doc-{n * 15 - 20}", 2, text(5000 + n, 2)), (f"doc-{n * 15 - 25}", 2, None)]
        slices.append(events)
        final |= {name: content for name, _, content in events}
    return slices, final


def name_seed(name):
    return int(name.removeprefix("doc-"))


def publish(kafka, events):
    with Publisher(kafka) as publisher:
        for name, version, content in events:
            headers = ((VERSION_HEADER, str(version).encode()),)
            value = None if content is None else EventBody(content=content).to_bytes()
            publisher.publish(kafka.documents_topic, name.encode(), value, headers)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(400)
def test_ing_06_kill_9_at_twenty_random_moments_loses_and_doubles_nothing(apache_kafka, tmp_path):
    """Offsets that are committed before the effects lose documents; effects that are not idempotent double them."""
    kafka = kafka_settings(apache_kafka.bootstrap, str(tmp_path))
    values = {
        "data_dir": str(tmp_path / "data"),
        "cache_dir": str(tmp_path / "cache"),
        "kafka": kafka.model_dump(),
        "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
        "chunker": {"max_tokens": 32},
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
    settings = load_settings(file=tmp_path / "settings.yaml")
    identity = resolve_generation(settings)  # also fills the cache that all lives use
    ensure_topics(kafka)
    rng = random.Random(0)
    slices, final = events()
    with (tmp_path / "errors.txt").open("w") as errors:
        zygote = Zygote(tmp_path / "settings.yaml", errors)
        try:
            for life, slice_ in enumerate(slices):
                publish(kafka, slice_)
                zygote.start()
                if life % 2:  # in the middle of its work
                    before, end = artifacts(tmp_path), time.monotonic() + 10
                    while artifacts(tmp_path) == before and time.monotonic() < end:
                        time.sleep(0.02)
                    time.sleep(rng.uniform(0, 1))
                else:  # anywhere, also while it starts; the moment is what is random, nothing is awaited
                    time.sleep(rng.uniform(0.5, 4))
                assert zygote.end(signal.SIGKILL) == -signal.SIGKILL
            zygote.start()
            end = time.monotonic() + WAIT_S
            groups = [(f"{kafka.group}.index", kafka.documents_topic), (f"{kafka.group}.prefill", kafka.commits_topic)]
            while any(lag(kafka, group, topic) for group, topic in groups):
                assert time.monotonic() < end, (tmp_path / "errors.txt").read_text()[-3000:]
                time.sleep(0.2)
            assert zygote.end(signal.SIGTERM) == 0, (tmp_path / "errors.txt").read_text()[-3000:]
        finally:
            zygote.close()
    assert list(read_all(kafka, kafka.dead_letter_topic)) == []
    check(settings, identity, final)


def artifacts(folder):
    """How many KV artifacts there are: it changes while the pipelines are at work."""
    return sum(len(files) for _, _, files in os.walk(folder / "data" / "blobs"))


def check(settings, identity, final):
    generation = identity.generation
    kv = KvStore(open_blobs(settings.blobs_url, {}), generation.name)
    with open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim) as index:
        heads = {head.doc_id: head for head in index.documents()}
        assert heads.keys() == final.keys()
        for doc_id, content in final.items():
            document, head = DocumentKey("default", doc_id), heads[doc_id]
            points = index.chunks(document)
            assert head.live is (content is not None), doc_id
            assert [point.chunk.ordinal for point in points] == list(range(head.n_chunks)), "each chunk exactly once"
            assert " ".join(point.chunk.text for point in points) == (content or ""), doc_id
            assert all(point.kv_ready and point.chunk.version == head.version for point in points), doc_id
            assert set(kv.keys(document)) == {point.kv_key for point in points}, doc_id
            for point in points:  # raises where an artifact is torn
                digest = point.chunk.token_digest
                kv.get(document, point.kv_key, fingerprint=identity.fingerprint.digest, token_sha256=digest)
