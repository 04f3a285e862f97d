"""The KV artifact's file: golden bytes, round trips, and agreement with the safetensors library."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, MissReason
from schemas.ids import DocumentKey, artifact_key, token_digest
from schemas.kv_artifact import NeighbourName, check, decode, encode
from stores.fakes import fake_artifact, fake_fingerprint

GOLDEN = Path(__file__).parents[1] / "golden"
DOC = DocumentKey("acme", "handbook/ü")
IDS = [1, 49_151, 2]
VERSION = 1_764_000_000_000 << 21 | 5
GENERATION = "0123456789abcdef"


@pytest.mark.parametrize(
    ("dtype", "file_sha256", "payload_sha256", "fingerprint"),
    [
        (
            "float32",
            "f0355a766ac7697c6e46b38fa4b70fd6eec4dbe4fddd497fd54bae7b8d824344",
            "7483198c23b524851c53153761c87c39689512d2a8e2d10c196c1f4fbf465269",
            "a3031dcb404953f13a519fe77a869d4d14e326532db6e2cc2a37f69b5003b24a",
        ),
        (
            "bfloat16",
            "76b39a8a580ce8ea9a74c947d9aa2fa651ae1434718261d64b8d822b9345299c",
            "4396206df1f7dac2152023abd55d5674106c359784857d1e7784326fbf8886ca",
            "3016340cccd85bbc376bb5cc7040d7efb0c955bde5d5afac16b1f20ea32e6200",
        ),
    ],
)
def test_golden_bytes_of_format_1(dtype, file_sha256, payload_sha256, fingerprint):
    """A change here makes every stored artifact a miss: it needs a new format version, not new golden bytes."""
    data = (GOLDEN / f"kv_v1_{dtype}.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == file_sha256
    artifact = kv_artifact.decode(data)
    header = artifact.header
    assert (header.format_version, header.generation, header.document) == (1, GENERATION, DOC)
    assert (header.version, header.ordinal, header.prefix_sha256) == (VERSION, 4, "3" * 64)
    assert header.fingerprint == fake_fingerprint(dtype=dtype, n_kv_heads=1)
    assert header.fingerprint.digest == fingerprint
    assert header.payload_sha256 == payload_sha256
    assert artifact.shape == (2, 1, 3, 4)
    assert artifact.token_ids.tolist() == IDS
    assert bytes(artifact.k[:8]).hex() == "3024373f262d1412"
    kv_artifact.check(
        artifact,
        generation=GENERATION,
        fingerprint=fingerprint,
        token_sha256="a9688eaf83d1e3501898e53f04843ab5940ee0a802dc5c0530f53366e6dfff94",
    )
    assert kv_artifact.encode(artifact) == data


def test_the_name_of_an_artifact_is_golden_too():
    key = artifact_key(fake_fingerprint().digest, "3" * 64, IDS)
    assert key == "94a3e26cd1f82a8c699ce805db0c4bbe6305a47d7720e6c2f52216ab55eb1a85"
    assert artifact_key(fake_fingerprint().digest, "3" * 64, IDS, ["a"]) != key
    assert artifact_key(fake_fingerprint().digest, "4" * 64, IDS) != key
    assert artifact_key(fake_fingerprint(layout="LTHD").digest, "3" * 64, IDS) != key


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(1, 9)),
    doc_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    version=st.integers(0, (1 << 63) - 1),
)
def test_kv_07_every_shape_and_name_comes_back_as_it_was_written(dtype, shape, doc_id, version):
    """Odd sizes too: a tensor that is not aligned, or a header that is not padded, could not be read again."""
    n_layers, n_heads, n_tokens, head_dim = shape
    fingerprint = fake_fingerprint(
        dtype=dtype, n_layers=n_layers, n_kv_heads=n_heads, head_dim=head_dim, rotary_dim=head_dim
    )
    _, artifact = fake_artifact(
        DocumentKey("t", doc_id), list(range(n_tokens)), version=version, fingerprint=fingerprint
    )
    data = kv_artifact.encode(artifact)
    got = kv_artifact.decode(data)
    assert (got.header, bytes(got.k), bytes(got.v)) == (artifact.header, artifact.k, artifact.v)
    assert got.token_ids.tolist() == list(range(n_tokens))
    assert got.shape == shape
    assert kv_artifact.encode(got) == data
    assert kv_artifact.read_header(data[: kv_artifact.header_end(data)]) == artifact.header


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n_tokens", [0, 1, 5])
def test_the_safetensors_library_reads_our_files(dtype, n_tokens):
    """The format is somebody else's, so that any tool can open a file."""
    _, artifact = fake_artifact(DOC, list(range(n_tokens)), fingerprint=fake_fingerprint(dtype=dtype))
    tensors = dict(safetensors.deserialize(kv_artifact.encode(artifact)))
    assert tensors.keys() == {"k", "v", "token_ids"}
    assert bytes(tensors["k"]["data"]) == artifact.k
    assert tensors["v"]["shape"] == [2, 3, n_tokens, 4]
    assert np.frombuffer(tensors["token_ids"]["data"], "<i4").tolist() == list(range(n_tokens))


def test_decoding_copies_nothing():
    """A chunk has tens of megabytes; the tensors are views into what was read."""
    _, artifact = fake_artifact(DOC, IDS)
    data = bytearray(kv_artifact.encode(artifact))
    got = kv_artifact.decode(data)
    data[-1] ^= 1
    assert got.v[-1] == artifact.v[-1] ^ 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generation": "other"}, MissReason.FINGERPRINT),
        ({"fingerprint": "0" * 64}, MissReason.FINGERPRINT),
        ({"token_sha256": token_digest([1, 2])}, MissReason.TOKEN_IDS),
    ],
)
def test_check_names_what_does_not_fit(change, reason):
    _, artifact = fake_artifact(DOC, IDS)
    header = artifact.header
    expected = {"generation": "fake", "fingerprint": header.fingerprint.digest, "token_sha256": header.token_sha256}
    kv_artifact.check(artifact, **expected)
    with pytest.raises(ArtifactMiss) as miss:
        kv_artifact.check(artifact, **(expected | change))
    assert miss.value.reason is reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_not_finite_is_an_exponent_of_all_ones_in_any_place(dtype):
    """Looked at in blocks: a mistake at a block's border would let one NaN through."""
    fingerprint = fake_fingerprint(dtype=dtype, n_layers=1, n_kv_heads=1, head_dim=64, rotary_dim=64)
    _, artifact = fake_artifact(DOC, [0] * 8200, fingerprint=fingerprint)  # 524,800 numbers: three blocks
    assert kv_artifact.is_finite(artifact)
    unsigned, infinite, largest = {
        "float32": (np.uint32, 0x7F800000, 0xFF7FFFFF),
        "bfloat16": (np.uint16, 0x7F80, 0xFF7F),
        "float16": (np.uint16, 0x7C00, 0xFBFF),
    }[dtype]
    for place in (0, (1 << 18) - 1, 1 << 18, -1):
        for pattern, finite in ((infinite, False), (infinite | 1, False), (largest, True)):
            rows = np.frombuffer(artifact.v, unsigned).copy()
            rows[place] = pattern
            assert kv_artifact.is_finite(replace(artifact, v=rows.tobytes())) is finite


def test_a_fused_artifact_names_its_neighbours_and_others_have_no_such_field():
    """Files of before must have the bytes that they had; a fused one says whose influence it holds."""
    _, plain = fake_artifact(DOC, [1, 2, 3])
    assert b"neighbours" not in encode(plain)
    names = (NeighbourName(tenant="t", doc_id="n", kv_key="k1"), NeighbourName(tenant="t", doc_id="m", kv_key="k2"))
    fused = replace(plain, header=plain.header.model_copy(update={"neighbours": names}))
    read = decode(encode(fused))
    assert read.header.neighbours == names
    asked = {"generation": "fake", "fingerprint": plain.header.fingerprint.digest}
    asked |= {"token_sha256": plain.header.token_sha256}
    check(read, **asked, neighbours=["k1", "k2"])
    for others in ([], ["k2", "k1"], ["k1"]):
        with pytest.raises(ArtifactMiss, match="fused with 2 chunks"):
            check(read, **asked, neighbours=others)
    with pytest.raises(ArtifactMiss, match="fused with 0 chunks"):
        check(plain, **asked, neighbours=["k1"])


@pytest.mark.parametrize("value", ['"x"', "[1]", '[{"tenant": "t"}]', "{}", "null", '[{"a": 1, "a": 1}]'])
def test_neighbours_that_are_none_are_refused(value):
    """A header is not trusted because its file is ours."""
    _, plain = fake_artifact(DOC, [1, 2, 3])
    names = (NeighbourName(tenant="t", doc_id="n", kv_key="k1"),)
    data = encode(replace(plain, header=plain.header.model_copy(update={"neighbours": names})))
    nbytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + nbytes])
    header["__metadata__"]["neighbours"] = value
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(ArtifactMiss, match="unreadable header"):
        decode(len(text).to_bytes(8, "little") + text + data[8 + nbytes :])
