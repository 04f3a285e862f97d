"""Dead letters sent again through the pipeline."""

from dataclasses import replace

import pytest

from schemas.errors import InputError
from stores.dead_letters import newest, read_letters, replay
from stores.fakes import CrashPoint, with_faults


def letters(world):
    messages = world.topics.messages(world.kafka.dead_letter_topic)
    return read_letters(messages, values_of=[letter.id for letter in read_letters(messages)])


def send(world):
    found = letters(world)
    changes = newest(world.topics.messages(world.kafka.documents_topic), found, world.kafka)
    return list(replay(world.publisher, world.kafka, found, changes))


def refuse(text):
    if "first" in text:
        raise ValueError("the embedder cannot take it")


def test_a_letter_that_is_sent_again_after_the_cause_is_gone_is_served(world):
    world.embedder.fails = refuse
    world.change("the first text", 1)
    world.index()
    assert world.texts() is None
    world.embedder.fails = lambda text: None
    list(replay(world.publisher, world.kafka, letters(world), {}))
    world.index()
    world.prefill()
    assert world.texts() == "the first text"
    world.assert_clean()


def test_an_old_letter_without_a_version_does_not_win_over_what_came_after_it(world):
    """The broker's clock at the time of the replay would make it the newest version.

    The change may have come when the topic had been looked through.
    """
    world.embedder.fails = refuse
    world.change("the first text")
    world.clock.advance(1)
    world.change("the second text")
    world.index()
    world.embedder.fails = lambda text: None
    world.clock.advance(60)
    list(replay(world.publisher, world.kafka, letters(world), {}))
    (work,) = world.index()
    assert work.outcome == "superseded"
    assert world.texts() == "the second text"


@pytest.mark.parametrize("text", ["the second text", None], ids=["changed", "deleted"])
def test_a_letter_that_a_change_has_overtaken_is_not_put_behind_it(world, text):
    """It would be the last record under its key: after compaction a rebuild would bring back what was changed."""
    world.embedder.fails = refuse
    world.change("the first text")
    world.index()
    world.clock.advance(1)
    last = world.change(text)
    world.index()
    world.embedder.fails = lambda text: None
    (refused,) = send(world)
    assert isinstance(refused, InputError)
    assert f"overtaken by a change of the same document (partition {last.partition}, offset {last.offset}" in str(
        refused
    )
    assert world.topics.messages(world.kafka.documents_topic)[-1] == last
    assert world.texts() == text
    assert not letters(world)[0].settled


def test_a_letter_with_a_higher_version_than_what_came_after_it_is_sent(world):
    """The producer's numbers decide, not the order in which they came."""
    world.embedder.fails = refuse
    world.change("the first text", 10)
    world.index()
    world.clock.advance(1)
    world.change("the second text", 9)
    world.index()
    world.embedder.fails = lambda text: None
    assert not isinstance(send(world)[0], InputError)
    world.index()
    assert world.texts() == "the first text"
    world.change("the third text", 11)
    world.index()
    assert isinstance(send(world)[0], InputError)


def test_a_letter_without_a_key_is_overtaken_by_nothing(world):
    world.raw(b"{}", key=None)
    world.index()
    world.clock.advance(1)
    world.raw(b"{}", key=None)
    assert [isinstance(outcome, InputError) for outcome in send(world)] == [False]


def test_a_letter_of_prefill_is_sent_again_to_prefill(world):
    def fails(chunks):
        if any(len(chunk) > 1 for chunk in chunks):
            raise ValueError("the model cannot take it")

    world.model.fails = fails
    world.change("a text", 1)
    world.index()
    world.prefill()
    assert [letter.stage for letter in letters(world)] == ["prefill"]
    world.model.fails = lambda chunks: None
    list(replay(world.publisher, world.kafka, letters(world), {}))
    world.prefill()
    world.assert_clean()


def test_a_value_that_the_topic_did_not_take_is_marked_and_never_sent_as_a_deletion(world):
    """A letter with its value left out looks like a tombstone."""
    world.change("a text", 1)
    world.index()
    world.raw(b"{" * 1000)
    point = CrashPoint("dead_letter", fault=InputError("the record is larger than the topic takes"))
    world.index(replace(world.index_parts, publisher=with_faults(world.publisher, point)))
    (letter,) = letters(world)
    assert (letter.omitted, letter.nbytes) == (True, 1000)
    (refused,) = replay(world.publisher, world.kafka, [letter], {})
    assert "publish the document again, split" in str(refused)
    world.index()
    assert world.texts() == "a text"
