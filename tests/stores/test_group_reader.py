"""Members of a real consumer group: how partitions come, are handed over, are lost, and who may commit."""

import threading
import time

import pytest
from kafka.errors import KafkaTimeoutError

from schemas.errors import SettingsError, TopicError
from stores.broker import EmbeddedBroker
from stores.group_reader import GroupReader, open_reader
from stores.topics import PartitionReader, Publisher, ensure_topics, lag
from tests.services.fixtures import kafka_settings

PATIENCE_S = 60
N = 30  # messages


@pytest.fixture
def kafka(apache_kafka, request):
    """A topic of three partitions with messages in each; a session of three seconds."""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid).model_copy(update={"session_timeout_s": 3.0})
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:
        publisher.publish_many(kafka.documents_topic, [(b"key %d" % n, b"%d" % n, ()) for n in range(N)])
    return kafka


@pytest.fixture
def join(kafka):
    """Opens members; all of them are polled by `until`."""
    members = []

    def open_member(**changes):
        settings = kafka.model_copy(update=changes)
        members.append(GroupReader(settings, settings.documents_topic, settings.group))
        return members[-1]

    yield open_member
    for member in members:
        member.close()


def until(condition, *members, release=True):
    """Poll the members until it holds; gives what they read, by member. They release what leaves, or not."""
    read = [[] for _ in members]
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {[member.held for member in members]}"
        for member, messages in zip(members, read, strict=True):
            messages += member.poll(100, 0.05)
            if release:
                member.release()
    return read


def has(member, n):
    return lambda: len(member.held) == n


@pytest.mark.service
def test_members_share_the_partitions_and_a_member_that_leaves_gives_its_own_back(kafka, join):
    """Two readers by assignment would both read everything."""
    one = join()
    until(has(one, 3), one)
    two = join()
    until(lambda: len(two.held) > 0, one, two)
    assert not one.held.keys() & two.held.keys()
    assert one.held.keys() | two.held.keys() == {0, 1, 2}
    two.close()
    until(has(one, 3), one)


@pytest.mark.service
def test_a_member_that_polls_for_moments_only_joins_all_the_same(kafka, join):
    """kafka-python throws away a join that is answered between two polls; it would be begun again for ever."""
    one = join()
    end = time.monotonic() + PATIENCE_S
    while len(one.held) < 3:
        assert time.monotonic() < end
        one.poll(100, 0)
        time.sleep(0.3)  # effects


@pytest.mark.service
def test_a_partition_that_goes_may_be_committed_until_it_is_released_and_is_read_on_from_there(kafka, join):
    """Effects that are under way in a rebalance would be done again by the next reader."""
    one = join()
    (read,) = until(lambda: len(one.held) == 3 and one.lag() == 0, one)
    assert len(read) == N
    done = one.position()
    two = join()
    until(lambda: one.leaving, one, two, release=False)
    gone = set(one.leaving)
    for _ in range(5):
        assert one.poll(100, 0.05) == []  # the rebalance waits for us, and so do we
    two.poll(100, 0.2)
    assert not two.held
    one.commit({partition: done[partition] for partition in gone})
    one.release()
    until(has(two, len(gone)), one, two)
    assert {partition: tenure.start for partition, tenure in two.held.items()} == {p: done[p] for p in gone}


class FirstAskUnanswered(GroupReader):
    """The first time that a partition comes, the broker does not say in time where the group is in it."""

    unanswered = 0

    def _committed(self, partitions):
        if self.held and not self.unanswered:
            self.unanswered += 1
            raise KafkaTimeoutError("no answer")
        return super()._committed(partitions)


@pytest.mark.service
def test_what_a_poll_has_read_is_not_lost_where_a_partition_that_comes_cannot_begin_yet(kafka):
    """Bug: the reader stood behind messages that nobody was given, and committed them with what came next."""
    with FirstAskUnanswered(kafka, kafka.documents_topic, kafka.group) as one:
        until(has(one, 3), one)
        one.seek({})
        one._consumer.pause(one._tp(2))
        one._moves.append(("coming", frozenset({2})))  # as its listener says it, while 0 and 1 are read on
        (read,) = until(lambda: one.lag() == 0, one)
    assert one.unanswered == 1
    assert {message.key for message in read} == {b"key %d" % n for n in range(N)}


@pytest.mark.service
def test_a_partition_that_nobody_releases_goes_all_the_same(kafka, join):
    """Else one slow bundle of an LLM would keep the whole group waiting."""
    one = join()
    until(has(one, 3), one)
    two = join()
    until(lambda: len(two.held) > 0, one, two, release=False)
    assert not one.leaving


@pytest.mark.service
def test_ing_13_a_member_that_nobody_polls_keeps_its_place_and_lets_others_in(kafka, join):
    """dpkp/kafka-python#1401: while a slow handler works the group waits for its poll, or throws it out."""
    slow = join()
    until(has(slow, 3), slow)
    before = slow.position()
    two = join()
    until(lambda: len(two.held) == 1 and len(slow.held) == 2, two)  # `slow` is not polled by anybody but itself
    assert slow.position() == {partition: before[partition] for partition in slow.held}


@pytest.mark.service
def test_ing_13_a_member_that_was_thrown_out_may_not_commit_and_comes_back(kafka, join):
    """A zombie that moves the group's offset makes its new owner skip, or repeat for ever."""
    zombie = join()
    until(lambda: len(zombie.held) == 3 and zombie.lag() == 0, zombie)
    old = dict(zombie.held)
    awake = threading.Event()
    zombie._consumer._net.call_soon_threadsafe(awake.wait)  # its heartbeats stop, as in a process that is stopped
    other = join()
    until(has(other, 3), other)
    until(lambda: other.lag() == 0, other)
    other.commit(other.position())
    threading.Timer(0.5, awake.set).start()
    with pytest.raises(TopicError, match="goes on without this process, which was silent for longer than"):
        zombie.commit(dict.fromkeys(range(3), 1))
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0
    read = until(lambda: zombie.held and zombie.lag() == 0 and len(other.held) == 3 - len(zombie.held), zombie, other)
    assert not zombie.held.keys() & other.held.keys()
    assert all(zombie.held[p].number > old[p].number for p in zombie.held)
    assert read == [[], []]  # it is where the group is, not where it was


def four_members(join):
    """Of three partitions, settled; the idle one is first."""
    members = [join() for _ in range(4)]
    until(lambda: sorted(len(m.held) for m in members) == [0, 1, 1, 1] and all(m.joined for m in members), *members)
    return sorted(members, key=lambda member: len(member.held))


@pytest.mark.service
def test_more_members_than_partitions_one_waits_and_knows(kafka, join):
    idle, *_ = four_members(join)
    assert (idle.lag(), idle.partitions) == (0, ())


@pytest.mark.service
def test_an_idle_member_is_given_the_partition_of_one_that_leaves(kafka, join):
    idle, busy, *others = four_members(join)
    busy.close()
    until(has(idle, 1), idle, *others)


@pytest.mark.service
def test_a_static_member_that_restarts_gets_its_partitions_back_and_disturbs_nobody(kafka, join):
    """A rolling restart of N processes would be 2 N rebalances."""
    one, two = join(group_instance_id="a"), join(group_instance_id="b")
    until(lambda: len(one.held) + len(two.held) == 3 and one.held and two.held, one, two)
    had, kept = set(two.held), dict(one.held)
    two.close()
    again = join(group_instance_id="b")
    until(lambda: again.held, one, again)
    assert set(again.held) == had
    assert one.held == kept  # the same tenures: nothing was taken from it in between


@pytest.mark.service
def test_two_processes_with_one_instance_id_are_told_apart_and_the_first_one_stops(kafka, join):
    """The broker lets the newer one in and fences the other, which would work on without ever committing."""
    one = join(group_instance_id="a")
    until(lambda: len(one.held) == 3 and one.lag() == 0, one)
    two = join(group_instance_id="a")
    until(lambda: two.joined, two)
    with pytest.raises(TopicError):
        one.commit(one.position())
    with pytest.raises(SettingsError, match=r"kafka\.group_instance_id: another process of group .* is called 'a'"):
        until(lambda: False, one)


@pytest.mark.service
def test_a_session_time_out_that_the_broker_does_not_allow_is_named(kafka, join):
    member = join(session_timeout_s=1_801.0)
    with pytest.raises(SettingsError, match=r"kafka\.session_timeout_s: 1801 is outside of what the broker allows"):
        until(lambda: False, member)


def test_on_the_embedded_broker_one_process_reads_everything_and_says_so(request, caplog):
    """Its groups do not work: a second member stops the first one's commits, for good."""
    caplog.set_level("INFO")
    with EmbeddedBroker() as broker:
        kafka = kafka_settings(broker.bootstrap, request.node.nodeid)
        ensure_topics(kafka)
        with open_reader(kafka, kafka.documents_topic, kafka.group) as reader:
            assert type(reader) is PartitionReader
            assert reader.partitions == (0, 1, 2)
    assert "the embedded broker divides nothing; this process reads all of it: run no other" in caplog.text


@pytest.mark.service
def test_on_apache_kafka_it_is_a_member(kafka):
    with open_reader(kafka, kafka.documents_topic, kafka.group) as reader:
        assert type(reader) is GroupReader
