"""`kvquilt dlq` on the embedded broker: what is listed, shown and sent again."""

import json

import pytest

from cli.context import Context, Format
from cli.dlq import Which, ls, send_again, set_aside, show
from schemas.errors import EventError, InputError
from schemas.settings import load_settings
from stores.dead_letters import LetterId
from stores.topics import Publisher, ensure_topics, read_all
from tests.services.fixtures import kafka_settings


@pytest.fixture
def context(memory_broker, request):
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    return Context(load_settings({"kafka": kafka.model_dump()}), Format.JSON, quiet=True)


@pytest.fixture
def put_aside(context):
    """Puts a message aside and gives the letter's id."""
    kafka = context.settings.kafka
    with Publisher(kafka) as publisher:

        def put(key, value, stage="parse", **options):
            message = publisher.publish(kafka.documents_topic, key, value, (("trace", b"t1"),))
            error = EventError(f"cannot read {key!r}", stage)
            letter = publisher.dead_letter(kafka, message, error, stage, 1, **options)
            return str(LetterId(letter.partition, letter.offset))

        yield put


def printed(capsys):
    return json.loads(capsys.readouterr().out)


def documents(context):
    return list(read_all(context.settings.kafka, context.settings.kafka.documents_topic))


def test_letters_are_listed_filtered_shown_and_sent_again(context, put_aside, capsys):
    first = put_aside(b"a", b"{broken")
    second = put_aside(b"b", b"\xff\xfe", stage="embed")
    ls(context, Which(), 50)
    listed = printed(capsys)
    assert (listed["total"], listed["replayed"]) == (2, 0)
    assert sorted(letter["id"] for letter in listed["letters"]) == sorted([first, second])
    ls(context, Which(stage="embed"), 50)
    assert [letter["key"] for letter in printed(capsys)["letters"]] == ["b"]

    show(context, first)
    shown = printed(capsys)
    assert (shown["message"], shown["value"], shown["headers"]) == ("cannot read b'a'", "{broken", [["trace", "t1"]])
    show(context, second)
    assert printed(capsys)["value_base64"] == "//4="

    send_again(context, Which(stage="embed"), dry_run=True)
    assert [letter["id"] for letter in printed(capsys)["would_send"]] == [second]
    assert len(documents(context)) == 2

    send_again(context, Which((LetterId.of(first),)), dry_run=False)
    assert [one["letter"] for one in printed(capsys)["sent"]] == [first]
    assert [message.value for message in documents(context)].count(b"{broken") == 2
    ls(context, Which(), 50)
    listed = printed(capsys)
    assert (listed["total"], listed["replayed"], [letter["id"] for letter in listed["letters"]]) == (2, 1, [second])
    ls(context, Which(again=True), 50)
    assert printed(capsys)["matching"] == 2


def test_a_dismissed_letter_is_left_out_and_can_still_be_sent(context, put_aside, capsys):
    first, second = put_aside(b"a", b"{"), put_aside(b"b", b"{")
    set_aside(context, Which(key="a"), dry_run=True)
    assert [letter["id"] for letter in printed(capsys)["would_dismiss"]] == [first]
    set_aside(context, Which(key="a"), dry_run=False)
    assert [letter["id"] for letter in printed(capsys)["dismissed"]] == [first]
    ls(context, Which(), 50)
    listed = printed(capsys)
    assert (listed["total"], listed["dismissed"]) == (2, 1)
    assert [letter["id"] for letter in listed["letters"]] == [second]
    send_again(context, Which((LetterId.of(first),)), dry_run=False)
    assert [one["letter"] for one in printed(capsys)["sent"]] == [first]
    with pytest.raises(InputError, match="no dead letter 0:99"):
        set_aside(context, Which((LetterId(0, 99),)), dry_run=False)


def test_one_letter_that_cannot_be_sent_is_named_and_the_others_go(context, put_aside, capsys):
    lost = put_aside(b"a", None, omitted_nbytes=40_000_000)
    put_aside(b"b", b"{")
    with pytest.raises(InputError, match=f"1 of 2 cannot be sent, the first: {lost}: dead letter {lost} was kept with"):
        send_again(context, Which(), dry_run=False)
    assert len(printed(capsys)["sent"]) == 1


def test_a_letter_that_is_not_there_is_an_error(context, put_aside):
    put_aside(b"a", b"{")
    with pytest.raises(InputError, match="no dead letter 0:99"):
        show(context, "0:99")
    with pytest.raises(InputError, match="no dead letter 0:99"):
        send_again(context, Which((LetterId(0, 99),)), dry_run=False)


def test_a_list_for_people_has_a_line_for_each_letter(context, put_aside, capsys):
    letter = put_aside(b"guides/lake", b"{")
    people = Context(context.settings, Format.TERMINAL, quiet=True)
    ls(people, Which(), 50)
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("1 in ")
    assert line.split()[0] == letter
    assert line.endswith("parse   guides/lake: cannot read b'guides/lake'")
    show(people, letter)
    assert capsys.readouterr().out.splitlines()[-2:] == ["  trace: t1", "{"]
