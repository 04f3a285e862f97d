"""`kvquilt doctor` over a broker: what waits in the dead-letter topic is a warning that says what to do."""

import pytest

from cli.context import Context, Format
from cli.dlq import Which, send_again, set_aside
from cli.doctor import _broker
from schemas.errors import EventError
from schemas.settings import load_settings
from stores.topics import Publisher, ensure_topics
from tests.services.fixtures import kafka_settings


@pytest.fixture
def settings(memory_broker, request, tmp_path):
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    return load_settings({"kafka": kafka.model_dump(), "data_dir": tmp_path})


def dead_letters(settings):
    return {check.name: check for check in _broker(settings, None)}["dead letters"]


def put_aside(settings, key):
    kafka = settings.kafka
    with Publisher(kafka) as publisher:
        message = publisher.publish(kafka.documents_topic, key, b"{")
        publisher.dead_letter(kafka, message, EventError("not JSON", "parse"), "parse", 1)


def test_dead_letters_are_a_warning_until_they_are_sent_again_or_dismissed(settings, capsys):
    """Bug: it said that all is well while documents were missing, and the count stood in a line that nobody reads."""
    topic = settings.kafka.dead_letter_topic
    check = dead_letters(settings)
    assert (check.state, check.says) == ("ok", f"none in {topic}")

    put_aside(settings, b"a")
    put_aside(settings, b"b")
    check = dead_letters(settings)
    assert check.state == "warn"
    assert check.says.startswith(f"2 put aside in {topic} and not settled, 0 more are. `kvquilt dlq ls` lists")

    send_again(Context(settings, Format.JSON, quiet=True), Which(), dry_run=False)
    check = dead_letters(settings)
    assert (check.state, check.says) == ("ok", f"2 in {topic}, all of them sent again or dismissed")

    put_aside(settings, b"c")
    assert dead_letters(settings).says.startswith(f"1 put aside in {topic} and not settled, 2 more are")
    set_aside(Context(settings, Format.JSON, quiet=True), Which(key="c"), dry_run=False)
    assert dead_letters(settings).state == "ok"
