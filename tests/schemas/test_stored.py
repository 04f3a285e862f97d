"""What is stored or sent whole comes back equal, or is refused by its name."""

import pytest

from schemas.errors import EventError, InputError
from schemas.generations import Generations
from schemas.head import CommitRecord
from schemas.receipt import Receipt, ReceiptPart
from schemas.replica import Replica

EVERY = {
    Generations: ("a record of generations", InputError),
    CommitRecord: ("a commit record", EventError),
    Receipt: ("a Receipt", InputError),
    ReceiptPart: ("a ReceiptPart", InputError),
    Replica: ("a Replica", InputError),
}


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_anything_else_is_refused_by_the_name_of_what_was_expected(kind):
    """Which of five kinds of object is damaged is what the operator has to know first."""
    what, error = EVERY[kind]
    for data in (b"\xff", b"{", b"[]", b'{"of another release": 1}'):
        with pytest.raises(InputError, match=f"^not {what}: .") as raised:
            kind.from_bytes(data)
        assert type(raised.value) is error


def test_what_was_stored_comes_back_equal():
    stored = Replica(name="one", positions={0: 7}, clean_ms=5)
    assert Replica.from_bytes(stored.to_bytes()) == stored
    assert stored.to_bytes() == b'{"name":"one","positions":{"0":7},"clean_ms":5,"dropped":[]}'
