"""Whether a pipeline's process works: gauges, readiness, the watchdog, and the three paths it answers."""

import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from ingest import health, telemetry
from ingest.http import HealthServer
from ingest.retry import store_retry
from ingest.source import Feed, FeedHealth
from schemas.errors import SettingsError, VectorIndexError
from schemas.settings import IngestSettings
from stores.clock import MovableClock
from stores.topics import Publisher, ensure_topics
from tests.services.fixtures import kafka_settings

WELL = FeedHealth(
    topic="documents", group="g.index", partitions=3, contact_age_s=0.1, record_age_s=1.0, commit_age_s=1.0,
    uncommitted=0, lag=0, messages=5, bundles=2, caught_up=True,
)  # fmt: skip


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def sample(name, **labels):
    return REGISTRY.get_sample_value(f"kvquilt_{name}", labels)


@pytest.mark.parametrize(
    ("changes", "idle_s", "said"),
    [
        ({}, 0, None),
        ({"lag": 700}, 0, None),
        ({"lag": 700, "record_age_s": 900.0}, 5, None),
        ({"record_age_s": None}, 9_999, None),
        ({"contact_age_s": 31.0}, 0, "the broker has not answered for 31 s"),
        ({"partitions": None}, 0, "it waits for group g.index to give it partitions of topic documents"),
        ({"partitions": 0, "record_age_s": None}, 9_999, None),
        ({"lag": 7, "record_age_s": 900.0}, 900, "7 messages wait, and nothing was read or done for 300 s"),
        ({"lag": 7, "record_age_s": None}, 900, "7 messages wait, and nothing was read or done for 300 s"),
        ({"caught_up": False, "lag": 40}, 0, "catching up with what was in topic documents when it started, 40 left"),
        ({"caught_up": False, "lag": None}, 0, "catching up with what was in topic documents when it started"),
    ],
    ids=["well", "behind and working", "a long batch", "an empty topic", "no broker", "joining",
         "more processes than partitions", "hangs", "never read", "starting",
         "before the first fetch"],
)  # fmt: skip
def test_ing_02_a_pipeline_that_has_work_and_does_nothing_is_not_ready(changes, idle_s, said):
    """A job that keeps making consumers and emits nothing looks alive to everybody."""
    reason = health.judge(replace(WELL, **changes), idle_s)
    assert reason is None if said is None else said in reason


@pytest.fixture
def feed(memory_broker, request):
    """Three messages are in the topic; nothing was read."""
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:
        for n in range(3):
            publisher.publish(kafka.documents_topic, f"doc {n}".encode(), b"{}")
    with Feed(kafka, kafka.documents_topic, f"{kafka.group}.index", threading.Event(), poll_s=0.05) as feed:
        yield feed


def read(feed, n):
    """Take `n` messages, or see that there are no more."""
    taken = 0
    for _ in range(200):
        taken += feed.take(0.1) is not None
        if taken >= n:
            return
    raise AssertionError(f"only {taken} of {n} messages came")


def test_a_pipeline_is_ready_when_it_has_done_what_was_there_at_the_start(feed):
    """Read is not done: until it is committed, a question would be answered from what was before."""
    assert not feed.health().caught_up
    read(feed, 3)
    assert not feed.health().caught_up
    feed.done(*feed.mark())
    assert feed.health().caught_up
    assert feed.health().uncommitted == 0


def test_once_caught_up_new_messages_do_not_make_it_unready(feed):
    read(feed, 3)
    feed.done(*feed.mark())
    assert feed.health().caught_up
    with Publisher(feed.kafka) as publisher:
        publisher.publish(feed.topic, b"doc 9", b"{}")
    read(feed, 1)
    assert feed.health().caught_up


def test_what_a_feed_knows_is_exported_while_it_runs(feed):
    read(feed, 3)
    with health.starting("index"), health.watched("index", feed):
        assert sample("consumer_lag", topic=feed.topic) == 0
        assert sample("uncommitted", topic=feed.topic) == 0
        assert 0 <= sample("records_last_seconds", topic=feed.topic) < 60
        assert 0 <= sample("broker_contact_seconds", topic=feed.topic) < 60
    assert sample("consumer_lag", topic=feed.topic) is None
    assert sample("records_last_seconds", topic=feed.topic) is None


def test_a_process_says_why_it_is_not_ready(feed):
    with HealthServer("127.0.0.1", 0) as server:
        assert fetch(f"{server.url}/readyz") == (503, "no pipeline runs in this process yet\n")
        with health.starting("index"):
            assert fetch(f"{server.url}/readyz") == (503, "index: it is starting\n")
            with health.watched("index", feed):
                status, said = fetch(f"{server.url}/readyz")
                assert (status, said.startswith("index: it is catching up")) == (503, True)
                read(feed, 3)
                feed.done(*feed.mark())
                assert fetch(f"{server.url}/readyz") == (200, "ready\n")


def test_alive_and_metrics_are_answered_from_the_start():
    with HealthServer("127.0.0.1", 0, lambda: "starting") as server:
        assert fetch(f"{server.url}/healthz") == (200, "ok\n")
        status, page = fetch(f"{server.url}/metrics")
        assert (status, "kvquilt_freshness_seconds_count" in page) == (200, True)
        assert fetch(f"{server.url}/other")[0] == 404


def test_a_port_that_is_taken_is_said_in_one_sentence():
    with HealthServer("127.0.0.1", 0) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: .*ingest.http_port"):
            HealthServer("127.0.0.1", port).__enter__()


SERIES = [
    ("freshness_seconds_count", {"kind": "text"}),
    ("freshness_seconds_count", {"kind": "kv"}),
    ("dlq_total", {"stage": "parse"}),
    ("dlq_total", {"stage": "prefill"}),
    ("events_total", {"pipeline": "index", "outcome": "committed"}),
    ("events_total", {"pipeline": "prefill", "outcome": "superseded"}),
    ("deletions_total", {"state": "pending"}),
    ("retired_total", {"kind": "artifacts"}),
]


@pytest.mark.parametrize(("name", "labels"), SERIES)
def test_each_series_is_there_from_the_start(name, labels):
    """A rate over a series that appears with its first event misses that event."""
    assert sample(name, **labels) is not None


def test_retries_are_counted_by_what_was_tried():
    before = sample("retries_total", action="upserting points") or 0
    attempts = iter([VectorIndexError("away"), VectorIndexError("away"), None])

    def action():
        error = next(attempts)
        if error is not None:
            raise error

    store_retry(action, "upserting points", IngestSettings(), MovableClock())
    assert sample("retries_total", action="upserting points") == before + 2


def test_a_finished_batch_is_activity():
    telemetry._Activity.at_s -= 1_000
    assert telemetry.idle_s() >= 1_000
    with telemetry.stage_seconds("plan"):
        pass
    assert telemetry.idle_s() < 1_000
