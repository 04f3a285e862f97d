"""Malformed events of every format: refused with a sentence, and the page that lists them is what really happens."""

import pytest

from schemas.errors import EventError
from tests.ingest.formats_cases import CASES, FIELDS
from tests.ingest.formats_table import PAGE, page_with, table

NAMED = [(name, sent) for name, cases in CASES.items() for sent in cases]


@pytest.mark.parametrize(("name", "sent"), NAMED, ids=[f"{name}: {sent}" for name, sent in NAMED])
def test_a_malformed_event_is_a_dead_letter_that_says_what_was_wrong(formats, name, sent):
    make, says = CASES[name][sent]
    with pytest.raises(EventError) as refused:
        formats.reader(fields=FIELDS).read(make(formats))
    assert says in str(refused.value)
    assert refused.value.stage == "parse"
    assert len(str(refused.value)) < 600, "the message must fit in a header and in a line of a log"
    assert "\n" not in str(refused.value)


def test_the_table_of_dead_letters_is_what_the_reader_says():
    """Where this fails, run `python -m tests.ingest.formats_table` and read the difference."""
    page = PAGE.read_text()
    assert page_with(table(), page) == page
