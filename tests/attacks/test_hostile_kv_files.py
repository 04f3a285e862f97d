"""Hostile KV files: whatever a file holds, reading it is an artifact that may be used or a miss with its reason.

A damaged store, a foreign tool or an attacker with write access to the bucket can put any bytes under a key.
Files whose header is at fault are in `test_hostile_kv_headers`.
"""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, MissReason
from schemas.ids import token_digest
from schemas.kv_artifact import payload_sha256
from stores.blobs import open_blobs
from stores.fakes import fake_artifact, fake_fingerprint
from stores.kv_store import KvStore
from tests.attacks.hostile import (
    DATA,
    DOC,
    END,
    FINGERPRINT,
    GOLDEN,
    GOOD,
    IDS,
    KEY,
    changed,
    file,
    read,
    refused,
    with_tensor,
)


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
