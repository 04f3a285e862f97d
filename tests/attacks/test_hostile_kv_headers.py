"""Hostile KV files whose header is at fault: it is none of ours, or it does not describe what follows it."""

from __future__ import annotations

import json
import struct

import pytest

from schemas.errors import MissReason
from tests.attacks.hostile import (
    DATA,
    END,
    FINGERPRINT,
    changed,
    file,
    refused,
    with_fingerprint,
    with_tensor,
)


@pytest.mark.parametrize("length", [(1 << 20) + 1, 100 << 20, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_kv_07_a_huge_header_is_refused_before_it_is_read(length):
    reason, message = refused(struct.pack("<Q", length) + DATA[8:])
    assert (reason, "at most 1048576 are read" in message) == (MissReason.FORMAT, True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"text"',
        "{}",
        '{"__metadata__": null}',
        '{"__metadata__": []}',
        '{"__metadata__": {}}',
        '{"__metadata__": "text"}',
        '{"__metadata__": {"format_version": 1}}',
        '{"__metadata__": {"format_version": "{"}}',
        b"\xff\xfe{\x00}\x00",
        b"\xc3\x28",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"__metadata__": {"format_version": "' + "[" * 100_000 + '"}}',
        '{"n": ' + "9" * 100_000 + "}",
        '{"n": 1e999}',
        '{"n": NaN}',
        "{" + ",".join(f'"k{n}": {{}}' for n in range(50_000)) + "}",
        '{"a": "' + "\\u0000" * 100_000 + '"}',
    ],
    ids=lambda header: repr(header[:24]),
)
def test_a_header_that_is_no_header_of_ours_is_a_format_miss(header):
    """JSON bombs too: depth, long numbers, many keys; none may end in RecursionError, MemoryError or a hang."""
    reason, message = refused(file(header))
    assert reason is MissReason.FORMAT
    assert len(message) < 600


def test_a_header_that_says_a_thing_twice_is_refused():
    """Of two equal keys one parser takes the first and another the last: what was checked is not what is used."""
    text = DATA[8:END].decode()
    twice = text.replace('"k":{', '"k":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"k":{', 1)
    reason, message = refused(file(twice))
    assert (reason, "stands twice" in message) == (MissReason.FORMAT, True)


def test_a_header_that_leaves_the_tensors_unaligned_is_refused():
    text = DATA[8:END] + b" "
    reason, message = refused(struct.pack("<Q", len(text)) + text + DATA[END:])
    assert (reason, "aligned" in message) == (MissReason.FORMAT, True)


METADATA_CHANGES = {
    "a newer format": {"format_version": "2"},
    "a format that is no number": {"format_version": '"1"'},
    "a format that is a fraction": {"format_version": "1.5"},
    "a format that is true": {"format_version": "true"},
    "no format": {"format_version": None},
    "a format given as a number": {"format_version": 1},
    "no fingerprint": {"fingerprint": None},
    "an empty fingerprint": {"fingerprint": "{}"},
    "a fingerprint that is a list": {"fingerprint": "[]"},
    "a version that is text": {"version": '"7"'},
    "a version that is infinite": {"version": "1e999"},
    "a field that nobody knows": {"surprise": "1"},
    "no payload checksum": {"payload_sha256": None},
    "half of a surrogate pair": {"tenant": "\ud800"},
    "half of a surrogate pair in the fingerprint": {
        "fingerprint": json.dumps(FINGERPRINT.model_dump() | {"model": "\ud800"})
    },
}


@pytest.mark.parametrize("change", METADATA_CHANGES.values(), ids=METADATA_CHANGES.keys())
def test_metadata_that_is_incomplete_or_of_a_wrong_type_is_a_format_miss(change):
    def apply(header):
        for name, value in change.items():
            header["__metadata__"][name] = value
            if value is None:
                del header["__metadata__"][name]

    assert refused(changed(apply))[0] is MissReason.FORMAT


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float64"},
        {"dtype": "int8"},
        {"dtype": ""},
        {"n_layers": 0},
        {"n_layers": -2},
        {"n_layers": 2.0},
        {"n_layers": True},
        {"n_layers": "2"},
        {"n_layers": 10**30},
        {"head_dim": 2**63},
        {"n_kv_heads": None},
        {"rope": {}},
        {"rope": {"x": 1}},
        {"extra": 1},
    ],
    ids=repr,
)
def test_kv_02_a_fingerprint_that_does_not_describe_the_tensors_is_refused(fields):
    expected = {MissReason.FINGERPRINT} if fields == {"rope": {}} else {MissReason.FORMAT}
    assert refused(with_fingerprint(**fields))[0] in expected


@pytest.mark.parametrize("fields", [{"model": "other"}, {"rope_layout": "interleaved"}, {"layout": "LHDT"}], ids=repr)
def test_kv_02_another_model_or_layout_with_the_same_shapes_is_a_fingerprint_miss(fields):
    assert refused(with_fingerprint(**fields))[0] is MissReason.FINGERPRINT


# --- the tensors


TENSOR_CHANGES = {
    "another dtype": ("k", {"dtype": "BF16"}),
    "a dtype that is no text": ("k", {"dtype": 32}),
    "an unknown dtype": ("v", {"dtype": "F4"}),
    "ids that are int64": ("token_ids", {"dtype": "I64"}),
    "axes exchanged": ("k", {"shape": [3, 2, 3, 4]}),
    "one axis less": ("k", {"shape": [6, 3, 4]}),
    "one token more": ("v", {"shape": [2, 3, 4, 4]}),
    "a shape of numbers with fractions": ("v", {"shape": [2.5, 3, 3, 4]}),
    "a shape that is nested": ("v", {"shape": [[2, 3, 3, 4]]}),
    "no shape": ("v", {"shape": None}),
    "negative tokens": ("token_ids", {"shape": [-3]}),
    "tokens beyond memory": ("token_ids", {"shape": [10**18]}),
    "tokens that are infinite": ("token_ids", {"shape": [float("inf")]}),
    "tokens that are true": ("token_ids", {"shape": [True]}),
    "two axes of tokens": ("token_ids", {"shape": [3, 1]}),
    "no offsets": ("k", {"data_offsets": None}),
    "one offset": ("k", {"data_offsets": [12]}),
    "three offsets": ("k", {"data_offsets": [12, 300, 588]}),
    "offsets that are text": ("k", {"data_offsets": ["12", "300"]}),
    "offsets with fractions": ("k", {"data_offsets": [12.0, 300.0]}),
    "a negative offset": ("k", {"data_offsets": [-288, 0]}),
    "both offsets negative": ("k", {"data_offsets": [-300, -12]}),
    "offsets in the wrong order": ("k", {"data_offsets": [300, 12]}),
    "an offset beyond 64 bits": ("k", {"data_offsets": [1 << 70, (1 << 70) + 288]}),
    "v over k": ("v", {"data_offsets": [12, 300]}),
    "v over half of k": ("v", {"data_offsets": [156, 444]}),
    "k over the ids": ("k", {"data_offsets": [0, 288]}),
    "a gap": ("v", {"data_offsets": [304, 592]}),
}


@pytest.mark.parametrize(("name", "fields"), TENSOR_CHANGES.values(), ids=TENSOR_CHANGES.keys())
def test_a_tensor_that_is_not_what_or_where_it_must_be_is_a_format_miss(name, fields):
    assert refused(with_tensor(name, **fields))[0] is MissReason.FORMAT


@pytest.mark.parametrize("name", ["k", "v", "token_ids"])
def test_a_tensor_that_is_missing_or_no_object_is_a_format_miss(name):
    assert refused(changed(lambda h: h.pop(name)))[0] is MissReason.FORMAT
    for value in (None, [], "F32", 7):
        assert refused(changed(lambda h, v=value: h.update({name: v})))[0] is MissReason.FORMAT


@pytest.mark.parametrize(
    "entry", [{"dtype": "F32", "shape": [0], "data_offsets": [588, 588]}, {"dtype": "U8", "shape": [4]}, None, "x"]
)
def test_a_tensor_that_nobody_asked_for_is_refused(entry):
    """What a reader does not expect, it must not carry along."""
    reason, message = refused(changed(lambda h: h.update({"extra": entry})))
    assert (reason, "no other" in message) == (MissReason.FORMAT, True)


def test_a_tensor_behind_the_end_of_the_file_is_truncated():
    reason, message = refused(DATA[:-288])
    assert (reason, f"the file at {len(DATA) - 288}" in message) == (MissReason.TRUNCATED, True)
