"""Identity is a function of its input alone: the same on every machine, in every process, in every order."""

import subprocess
import sys
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import (
    PACKED_VERSION_MIN,
    DocumentKey,
    artifact_key,
    canonical_bytes,
    chunk_id,
    digest,
    head_id,
    is_packed,
    packed_version,
    token_digest,
)

DOCUMENT = DocumentKey("acme", "handbook/leave.md")
ANY_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_ids_are_the_ones_of_every_release():
    """Bug: a change of spelling renamed every point, and the old ones were never found again."""
    assert chunk_id(DOCUMENT, 3, 0) == uuid.UUID("0f2bbfe0-736b-578a-9230-75ddc11490f7")
    assert head_id(DOCUMENT) == uuid.UUID("610d84e3-5ff5-5157-84e6-c382fb0ad91c")
    assert DOCUMENT.digest == "75490c79fac1ef3a30e471d78cc7be349827cffe47e82d542e48724ba7994479"
    assert artifact_key("f", "p", [1, 2, 3]) == "7a1f64d2ba326e6341a6986f14bfc7f57a80b51d1a838f1db26926dee33df7c0"


def test_vec_10_the_same_document_has_the_same_ids_in_another_process():
    """Bug (haystack#1116): ingesting again made duplicates. Python's own hash() differs between processes."""
    program = "from schemas.ids import *; print(chunk_id(DocumentKey('acme', 'handbook/leave.md'), 3, 0))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(chunk_id(DOCUMENT, 3, 0))


def test_every_part_of_a_name_tells_names_apart():
    ids = {
        chunk_id(DOCUMENT, 3, 0),
        chunk_id(DOCUMENT, 3, 1),
        chunk_id(DOCUMENT, 4, 0),
        chunk_id(DocumentKey("acm", "ehandbook/leave.md"), 3, 0),
        chunk_id(DocumentKey("other", DOCUMENT.doc_id), 3, 0),
        head_id(DOCUMENT),
    }
    assert len(ids) == 6


@given(st.text(), st.text(), st.text(), st.text())
def test_two_document_keys_share_a_digest_only_if_they_are_equal(tenant, doc_id, other_tenant, other_doc_id):
    """Bug: joining with a separator let (a/b, c) and (a, b/c) be the same document, across tenants."""
    one, other = DocumentKey(tenant, doc_id), DocumentKey(other_tenant, other_doc_id)
    assert (one.digest == other.digest) == (one == other)


@given(ANY_TOKENS, ANY_TOKENS)
def test_kv_05_token_lists_share_a_digest_only_if_they_are_equal(one, other):
    """Bug (vllm#8229 and others): weak hashes collide. Ours is SHA-256 over fixed-width ids."""
    assert (token_digest(one) == token_digest(other)) == (one == other)


def test_a_token_digest_does_not_depend_on_the_container():
    assert token_digest([1, 2]) == token_digest((1, 2)) == token_digest(np.array([1, 2], dtype=np.int64).tolist())


def test_an_artifact_key_changes_with_model_prefix_tokens_and_neighbours():
    keys = {
        artifact_key("f", "p", [1]),
        artifact_key("g", "p", [1]),
        artifact_key("f", "q", [1]),
        artifact_key("f", "p", [2]),
        artifact_key("f", "p", [1], ["n"]),
    }
    assert len(keys) == 5


def test_a_later_offset_of_the_same_millisecond_is_a_later_version():
    versions = [packed_version(1_700_000_000_000, offset) for offset in (5, 6, 7)] + [
        packed_version(1_700_000_000_001, 0)
    ]
    assert versions == sorted(set(versions))


def test_packed_versions_fit_an_int64_and_are_told_from_a_producers_counter():
    assert packed_version(4_000_000_000_000, 2**40) < 1 << 63
    assert is_packed(packed_version(1_700_000_000_000, 0))
    assert not is_packed(PACKED_VERSION_MIN - 1)


def test_canonical_bytes_have_one_spelling():
    assert canonical_bytes({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'.encode() == canonical_bytes({"a": "ü", "b": 1})
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})


def test_a_number_that_json_cannot_spell_is_refused():
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical_bytes(float("nan"))
