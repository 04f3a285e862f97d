"""Hostile KV files: whatever a file holds, reading it is an artifact that may be used or a miss with its reason.

A damaged store, a foreign tool or an attacker with write access to the bucket can put any bytes under a key.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, MissReason
from schemas.ids import DocumentKey, token_digest
from schemas.kv_artifact import KvArtifact, payload_sha256
from stores.blobs import open_blobs
from stores.fakes import fake_artifact, fake_fingerprint
from stores.kv_store import KvStore

DOC = DocumentKey("acme", "a")
IDS = [3, 1, 2]
FINGERPRINT = fake_fingerprint()
KEY, GOOD = fake_artifact(DOC, IDS)
DATA = kv_artifact.encode(GOOD)
END = kv_artifact.header_end(DATA)
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))


def read(data: bytes) -> KvArtifact:
    """As a reader does: decode, compare identity, check."""
    artifact = kv_artifact.decode(data)
    kv_artifact.check(
        artifact, generation="fake", fingerprint=FINGERPRINT.digest, token_sha256=GOOD.header.token_sha256
    )
    return artifact


def refused(data: bytes) -> tuple[MissReason, str]:
    with pytest.raises(ArtifactMiss) as miss:
        read(data)
    return miss.value.reason, str(miss.value)


def file(header: bytes | str, payload: bytes = DATA[END:]) -> bytes:
    """A file with this header text, padded, its length in front."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload


def changed(change: Callable[[dict[str, Any]], None], payload: bytes = DATA[END:]) -> bytes:
    """The good file with its parsed header changed."""
    header = json.loads(DATA[8:END])
    change(header)
    return file(json.dumps(header), payload)


def test_the_good_file_is_read_also_after_its_header_was_written_anew():
    """Otherwise every test below would pass for the wrong reason."""
    assert bytes(read(DATA).k) == GOOD.k
    assert bytes(read(changed(lambda h: None)).v) == GOOD.v


# --- truncated, and not a file of this kind at all


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, END - 1, END, END + 1, len(DATA) - 1])
def test_a_file_that_ends_early_is_truncated(nbytes):
    reason, message = refused(DATA[:nbytes])
    assert reason is MissReason.TRUNCATED
    assert str(nbytes) in message


@pytest.mark.parametrize("extra", [b"\0", b"x" * 4096, DATA])
def test_bytes_behind_the_tensors_are_refused(extra):
    """Whatever hides there survives a checksum that does not cover it."""
    reason, message = refused(DATA + extra)
    assert (reason, f"{len(extra)} bytes follow the tensors") == (MissReason.FORMAT, message)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95" + b"pickle" * 100,
        b"PK\x03\x04" + bytes(200),
        b"GGUF" + bytes(500),
        b"<html><body>404 Not Found</body></html>" * 9,
        bytes(2000),
        b"\xff" * 2000,
        b'{"not": "safetensors"}' * 50,
    ],
    ids=["pickle", "zip", "gguf", "html", "zeros", "ones", "json"],
)
def test_a_foreign_file_is_a_miss_and_nothing_of_it_is_run(data):
    reason, _ = refused(data)
    assert reason in (MissReason.FORMAT, MissReason.TRUNCATED)


# --- the header


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


def with_fingerprint(**fields: Any) -> bytes:
    def apply(header):
        fingerprint = json.loads(header["__metadata__"]["fingerprint"]) | fields
        header["__metadata__"]["fingerprint"] = json.dumps({k: v for k, v in fingerprint.items() if v is not None})

    return changed(apply)


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


def with_tensor(name: str, **fields: Any) -> bytes:
    return changed(lambda header: header[name].update(fields))


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


# --- the payload


@pytest.mark.parametrize("place", [END, END + 12, END + 13, END + 299, END + 300, len(DATA) - 1])
def test_one_flipped_bit_anywhere_in_the_payload_is_found(place):
    data = bytearray(DATA)
    data[place] ^= 1
    expected = MissReason.TOKEN_IDS if place < END + 12 else MissReason.CHECKSUM
    assert refused(bytes(data))[0] is expected


def test_kv_05_a_consistent_file_of_another_chunk_is_refused():
    """Its checksum is right: only the digest of the token ids tells that it is the wrong chunk."""
    _, other = fake_artifact(DOC, [9, 9, 9])
    assert refused(kv_artifact.encode(other))[0] is MissReason.TOKEN_IDS


def test_kv_05_ids_that_do_not_have_the_digest_that_the_header_claims_are_refused():
    ids = np.asarray([9, 9, 9], "<i4")

    def claim(header):
        header["__metadata__"]["payload_sha256"] = payload_sha256(GOOD.k, GOOD.v, ids)

    data = changed(claim, ids.tobytes() + DATA[END + 12 :])
    assert refused(data)[0] is MissReason.TOKEN_IDS


def test_kv_05_a_header_that_claims_other_ids_than_the_tensor_has_is_refused():
    claim = changed(lambda h: h["__metadata__"].update(token_sha256=token_digest([9, 9, 9])))
    assert refused(claim)[0] is MissReason.TOKEN_IDS


def test_a_tensor_that_begins_at_an_odd_byte_is_refused():
    """Whoever maps it as int32 or float32 would read from an address that some processors refuse."""
    odd = fake_fingerprint(dtype="bfloat16", n_layers=1, n_kv_heads=1, head_dim=1)
    _, artifact = fake_artifact(DOC, IDS, fingerprint=odd)
    data = kv_artifact.encode(artifact)
    header = json.loads(data[8 : kv_artifact.header_end(data)])
    for name, place in (("k", [0, 6]), ("token_ids", [6, 18]), ("v", [18, 24])):
        header[name]["data_offsets"] = place
    reason, message = refused(file(json.dumps(header), artifact.k + data[-24:-12] + artifact.v))
    assert (reason, "[6, 18)" in message) == (MissReason.FORMAT, True)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 71, 72, 143])
def test_rows_that_are_not_finite_are_refused_although_their_checksum_is_right(place, value):
    """One NaN in a key row makes the whole answer NaN, and sampling from NaN is an arbitrary token."""
    rows = np.frombuffer(GOOD.k + GOOD.v, np.float32).copy()
    rows[place] = value
    k, v = rows[:72].tobytes(), rows[72:].tobytes()

    def claim(header):
        header["__metadata__"]["payload_sha256"] = payload_sha256(k, v, GOOD.token_ids)

    reason, message = refused(changed(claim, DATA[END : END + 12] + k + v))
    assert (reason, "NaN or infinity" in message) == (MissReason.FORMAT, True)


# --- anything


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("cut", range(0, 1300, 37))
def test_no_prefix_of_a_golden_file_is_taken_for_a_file(path, cut):
    data = path.read_bytes()
    with pytest.raises(ArtifactMiss):
        kv_artifact.decode(data[: min(cut, len(data) - 1)])


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 3), st.binary(max_size=12)), min_size=1, max_size=4
    )
)
@example(edits=[(0, 3, b"\xff" * 8)])
def test_an_edited_file_is_a_miss_or_still_holds_the_same_rows_for_the_same_chunk(edits):
    data = bytearray(DATA)
    for place, length, replacement in edits:
        data[place : place + length] = replacement
    try:
        artifact = read(bytes(data))
    except ArtifactMiss:
        return
    assert (bytes(artifact.k), bytes(artifact.v), artifact.token_ids.tolist()) == (GOOD.k, GOOD.v, IDS)
    assert artifact.header.fingerprint == FINGERPRINT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    where=st.sampled_from(
        [(part,) for part in ("__metadata__", "k", "v", "token_ids")]
        + [("k", field) for field in ("dtype", "shape", "data_offsets")]
        + [("token_ids", field) for field in ("dtype", "shape", "data_offsets")]
        + [("__metadata__", field) for field in ("fingerprint", "version", "format_version", "tenant")]
    ),
    value=JSON,
    quoted=st.booleans(),
)
def test_any_json_in_any_place_of_the_header_is_a_miss_or_harmless(where, value, quoted):
    def apply(header):
        for part in where[:-1]:
            header = header[part]
        header[where[-1]] = json.dumps(value) if quoted else value

    try:
        artifact = read(changed(apply))
    except ArtifactMiss:
        return
    assert bytes(artifact.k) == GOOD.k


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_miss(data):
    for call in (kv_artifact.decode, kv_artifact.read_header):
        with pytest.raises(ArtifactMiss):
            call(data)


# --- through the store


def test_a_hostile_file_in_the_store_is_a_miss_for_get_and_inspect_and_a_put_replaces_it():
    store_url = "memory://hostile"
    hostile = [DATA[:-1], b"", file("[" * 100_000), with_tensor("k", data_offsets=[-300, -12]), b"\xff" * 5000]
    blobs = open_blobs(store_url)
    store = KvStore(blobs, "fake")
    for data in hostile:
        blobs.put_new(store.path(DOC, KEY), data)
        with pytest.raises(ArtifactMiss):
            store.get(DOC, KEY, fingerprint=FINGERPRINT.digest, token_sha256=token_digest(IDS))
        with suppress(ArtifactMiss):
            assert store.inspect(DOC, KEY) == GOOD.header  # a sound header over a damaged payload
        assert store.put(DOC, KEY, GOOD) is True
        assert store.delete(DOC, [KEY]) == 1
