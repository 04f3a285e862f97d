"""The tail of a topic, on real brokers: from the end on, every record for every reader."""

from __future__ import annotations

import time

import pytest

from schemas.errors import TopicError
from stores.tail import open_tail
from stores.topics import Publisher, ensure_topics

WAIT_S = 30


def read(tail, n):
    end_s, values = time.monotonic() + WAIT_S, []
    while len(values) < n:
        assert time.monotonic() < end_s, f"{n - len(values)} records did not come"
        values += [message.value for message in tail.poll(100, 0.2)]
    return sorted(values)


@pytest.fixture
def publish(kafka):
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:

        def _publish(*values):
            # in one batch: the embedded broker answers wrongly where the end is after such a one
            publisher.publish_many(kafka.commits_topic, [(value, value, ()) for value in values])

        yield _publish


def test_every_tail_sees_every_record_behind_the_end_that_it_found(kafka, publish):
    """Members of one group would divide them, and each replica would keep what the others dropped."""
    publish(*[f"before {n}".encode() for n in range(20)])
    with open_tail(kafka, kafka.commits_topic) as one, open_tail(kafka, kafka.commits_topic) as two:
        publish(b"a", b"b", b"c")
        assert read(one, 3) == read(two, 3) == [b"a", b"b", b"c"]
        assert sum(one.position().values()) >= 23


def test_a_tail_that_is_opened_again_goes_on_where_it_was(kafka, publish):
    publish(b"a", b"b")
    with open_tail(kafka, kafka.commits_topic) as tail:
        publish(b"c")
        assert read(tail, 1) == [b"c"]
        positions = tail.position()
    publish(b"d", b"e")
    with open_tail(kafka, kafka.commits_topic, positions) as tail:
        assert read(tail, 2) == [b"d", b"e"]


def test_a_topic_that_is_not_there_is_said_by_name(kafka):
    with pytest.raises(TopicError, match=kafka.commits_topic):
        open_tail(kafka, kafka.commits_topic)
