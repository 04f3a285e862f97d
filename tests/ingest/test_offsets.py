"""What may be committed while partitions come, go and come back: without a broker, by hand."""

import threading

import pytest

from ingest.feed import Feed
from ingest.offsets import Offsets
from schemas.settings import KafkaSettings
from stores.memory_groups import MemoryGroup
from stores.memory_topics import MemoryTopics
from stores.topics import Message, Tenure

KAFKA = KafkaSettings(bootstrap="nowhere:1")
TOPIC, GROUP = "documents", "g"


def message(partition, offset):
    return Message(TOPIC, partition, offset, 0, None, b"")


@pytest.fixture
def group():
    """A topic of two partitions with ten messages each, and nobody who reads it."""
    topics = MemoryTopics(partitions=2)
    for n in range(40):
        topics.append(TOPIC, b"key %d" % n, b"%d" % n, ())
    return MemoryGroup(topics, TOPIC, GROUP)


@pytest.fixture
def join(group):
    """Opens feeds that are members of the group; the oldest is closed last."""
    opened = []

    def open_feed():
        feed = Feed(KAFKA, TOPIC, GROUP, threading.Event(), max_records=4, reader=lambda *_: group.member())
        opened.append(feed)
        return feed.__enter__()

    yield open_feed
    for feed in reversed(opened):
        feed.__exit__(None, None, None)


def take(feed, n):
    taken = [feed.take(0) for _ in range(n)]
    assert None not in taken
    return taken


def committed(group):
    return group.topics.committed(TOPIC, GROUP)


def drain(feed):
    """Everything that there is, done at once."""
    taken = []
    for _ in range(100):
        message = feed.take(0)
        if message is not None:
            taken.append(message)
        else:
            feed.done(*feed.mark())
    return taken


def test_ing_13_a_zombie_moves_nobodys_offset(group, join):
    """A process that was silent too long finishes its bundle: the group is further by then, and stays there."""
    zombie = join()
    first = take(zombie, 4)
    marks = zombie.mark()
    group.expire(zombie._reader)
    other = join()
    assert {(m.partition, m.offset) for m in first} <= {(m.partition, m.offset) for m in drain(other)}
    after = committed(group)
    zombie.done(*marks)  # refused by the broker, and no error here
    assert committed(group) == after
    assert zombie.health().uncommitted > 0
    zombie.take(0)  # now it knows
    assert zombie.health().uncommitted == 0
    zombie.done(*zombie.mark())
    assert committed(group) == after


def test_ing_13_what_was_read_in_an_earlier_stay_is_not_committed_in_a_later_one(group, join):
    """It loses its partitions, the others get on, it gets them back: only then its old bundle ends."""
    feed = join()
    take(feed, 4)
    marks = feed.mark()
    group.expire(feed._reader)
    group.topics.commit(TOPIC, GROUP, {0: 15, 1: 15})  # what others did meanwhile
    feed.take(0)
    assert set(feed._reader.held) == {0, 1}
    feed.done(*marks)
    feed.done(*feed.mark())
    assert min(committed(group).values()) >= 15
    resumed = feed._offsets.go_back(marks[0])
    assert min(resumed.values()) >= 15


def test_ing_09_a_partition_goes_when_the_effects_of_what_was_read_of_it_are_committed(group, join):
    """A rebalance in the middle of a bundle: nothing is done twice, nothing is left out."""
    one = join()
    in_flight = take(one, 4)
    two = join()
    assert two.take(0) is None  # the first one has everything still
    while (message := one.take(0)) is not None:
        in_flight.append(message)
    assert one.health().partitions == 1
    assert two.take(0) is None  # and keeps it until it is done
    one.done(*one.mark())
    rest = []
    for _ in range(60):
        rest += [message for message in (one.take(0), two.take(0)) if message is not None]
        one.done(*one.mark())
        two.done(*two.mark())
    everything = [(m.partition, m.offset) for m in in_flight + rest]
    assert len(everything) == len(set(everything)) == 40
    assert (one.health().partitions, two.health().partitions) == (1, 1)
    assert sum(committed(group).values()) == 40


def test_what_was_fetched_of_a_partition_that_goes_is_left_to_its_next_reader(group, join):
    """It would be done by both, and here without an offset that may be committed."""
    one = join()
    (first,) = take(one, 1)
    assert {m.partition for m in one._taken} == {first.partition} == {0}
    newcomer = group.member()
    group.members.reverse()  # partition 0 is to be the newcomer's
    assert one._reader.poll(1, 0) == []
    assert set(one._reader.leaving) == {0}
    one.done(*one.mark())
    assert committed(group) == {0: 1}
    assert one.take(0).partition == 1
    assert newcomer.poll(1, 0)[0].offset == 1


def test_a_process_without_a_partition_is_ready_and_one_that_has_not_joined_is_not(group, join):
    one, two, three = join(), join(), join()
    assert three.health().partitions is None
    assert not three.health().caught_up
    for _ in range(60):
        for feed in (one, two, three):
            feed.take(0)
            feed.done(*feed.mark())
    healths = [feed.health() for feed in (one, two, three)]
    assert [health.partitions for health in healths] == [1, 1, 0]
    assert all(health.caught_up for health in healths)
    assert [health.lag for health in healths] == [0, 0, 0]


def test_who_takes_over_an_idle_place_has_to_catch_up_first(group, join):
    """It was ready because it had nothing to do."""
    one, two, three = join(), join(), join()
    for feed in (one, two, three):
        feed.take(0)
    assert three.health().caught_up
    for feed in (one, two):
        group.expire(feed._reader)
    three.take(0)
    assert three.health().partitions == 2
    assert not three.health().caught_up
    assert len(drain(three)) == 39
    assert three.health().caught_up


def test_offsets_count_gaps_that_compaction_left_as_done():
    """The end of a compacted partition has no messages: its lag would stay for ever."""
    offsets = Offsets()
    offsets.settle({0: Tenure(1, 0)})
    offsets.see_ends({0: 10})
    offsets.read(message(0, 3))
    offsets.done(offsets.mark({0: 10}), 1)
    assert offsets.to_commit() == {0: 10}
    offsets.confirm({0: 10})
    assert offsets.caught_up
    assert not offsets.busy([0])


def test_a_run_that_failed_goes_back_to_what_is_done():
    offsets = Offsets()
    offsets.settle({0: Tenure(1, 5)})
    for offset in (5, 6):
        offsets.read(message(0, offset))
    offsets.done(offsets.mark({0: 7}), 1)
    offsets.read(message(0, 7))
    offsets.mark({0: 8})
    assert offsets.go_back(None) == {0: 7}
