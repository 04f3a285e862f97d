"""The KV store: what is put can be read by who may, and by nobody else; everything else is a miss with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, BlobError, MissReason
from schemas.ids import DocumentKey, token_digest
from stores.blobs import open_blobs
from stores.fakes import CrashPoint, fake_artifact, fake_fingerprint, with_faults
from stores.kv_store import KvStore

DOC = DocumentKey("acme", "handbook/1 ü")
IDS = [5, 6, 7, 8]
FINGERPRINT = fake_fingerprint().digest


@pytest.fixture
def store(blobs):
    return KvStore(blobs, "fake")


def get(store, document, key, ids=IDS, fingerprint=FINGERPRINT):
    return store.get(document, key, fingerprint=fingerprint, token_sha256=token_digest(ids))


def reason(call) -> MissReason:
    with pytest.raises(ArtifactMiss) as miss:
        call()
    return miss.value.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n_tokens", [0, 1, 300])
def test_kv_07_an_artifact_comes_back_as_it_was_put(store, dtype, n_tokens):
    fingerprint = fake_fingerprint(dtype=dtype)
    ids = list(range(n_tokens))
    key, artifact = fake_artifact(DOC, ids, fingerprint=fingerprint)
    assert store.put(DOC, key, artifact) is True
    got = get(store, DOC, key, ids, fingerprint.digest)
    assert (got.header, bytes(got.k), bytes(got.v)) == (artifact.header, artifact.k, artifact.v)
    assert got.token_ids.tolist() == ids
    assert got.shape == (2, 3, n_tokens, 4)


def test_an_artifact_lies_under_its_document_and_its_names_are_digests(store):
    """Tenant and document names never become path segments; one prefix holds all there is of a document."""
    key, artifact = fake_artifact(DOC, IDS)
    store.put(DOC, key, artifact)
    assert store.path(DOC, key) == f"kv/fake/{DOC.tenant_digest}/{DOC.digest}/{key}.safetensors"
    assert store.exists(DOC, key)
    assert store.keys(DOC) == [key]
    assert store.nbytes(DOC) == len(kv_artifact.encode(artifact))


def test_kv_09_putting_twice_keeps_the_first_and_says_so(store):
    key, artifact = fake_artifact(DOC, IDS)
    assert [store.put(DOC, key, artifact) for _ in range(3)] == [True, False, False]
    assert bytes(get(store, DOC, key).k) == artifact.k


def test_a_damaged_artifact_is_replaced_by_the_next_put(blobs, store):
    """Create-only would keep it for ever: that chunk would never be servable from KV again."""
    key, artifact = fake_artifact(DOC, IDS)
    torn = kv_artifact.encode(artifact)[:-1]
    blobs.put_new(store.path(DOC, key), torn)
    assert reason(lambda: get(store, DOC, key)) is MissReason.TRUNCATED
    assert store.put(DOC, key, artifact) is True
    assert bytes(get(store, DOC, key).v) == artifact.v


def test_an_artifact_that_is_not_there_is_missing(store):
    assert reason(lambda: get(store, DOC, "0" * 64)) is MissReason.MISSING
    assert reason(lambda: store.inspect(DOC, "0" * 64)) is MissReason.MISSING
    assert not store.exists(DOC, "0" * 64)
    assert store.keys(DOC) == []


def test_kv_02_another_layout_of_the_same_model_is_refused(store):
    """An engine that changed how its rows lie restored old caches and answered gibberish, without an error."""
    key, artifact = fake_artifact(DOC, IDS)
    store.put(DOC, key, artifact)
    for change in ({"layout": "LTHD"}, {"rope_layout": "interleaved"}, {"k_state": "post_rope"}, {"rotary_dim": 2}):
        assert (
            reason(lambda c=change: get(store, DOC, key, IDS, fake_fingerprint(**c).digest)) is MissReason.FINGERPRINT
        )


def test_kv_05_other_token_ids_under_the_same_name_are_refused(store):
    """Names can be wrong and weak hashes collide: the ids themselves are compared, by SHA-256, at every read."""
    key, artifact = fake_artifact(DOC, IDS)
    store.put(DOC, key, artifact)
    assert reason(lambda: get(store, DOC, key, [*IDS[:-1], 9])) is MissReason.TOKEN_IDS


def test_an_artifact_of_another_generation_is_refused(blobs, store):
    key, artifact = fake_artifact(DOC, IDS, generation="other")
    blobs.put_new(store.path(DOC, key), kv_artifact.encode(artifact))
    assert reason(lambda: get(store, DOC, key)) is MissReason.FINGERPRINT


@pytest.mark.parametrize("other", [DocumentKey("globex", DOC.doc_id), DocumentKey("acme", "handbook/2")])
def test_an_artifact_of_another_document_or_tenant_is_refused_although_its_text_is_the_same(blobs, store, other):
    """Nothing is shared between documents: a copied file must not outlive the delete of the one it came from."""
    key, artifact = fake_artifact(other, IDS)
    blobs.put_new(store.path(DOC, key), kv_artifact.encode(artifact))
    assert reason(lambda: get(store, DOC, key)) is MissReason.FINGERPRINT


def test_a_put_in_the_wrong_place_is_refused(store):
    key, artifact = fake_artifact(DOC, IDS)
    with pytest.raises(ValueError, match="it was to be put under acme/else"):
        store.put(DocumentKey("acme", "else"), key, artifact)
    _, foreign = fake_artifact(DOC, IDS, generation="old")
    with pytest.raises(ValueError, match="generation old"):
        store.put(DOC, key, foreign)
    assert store.keys(DOC) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["k", "v"])
def test_kv_11_rows_that_are_not_finite_are_never_stored(store, side, value):
    """A broken prefill would poison every answer that uses the chunk."""
    key, artifact = fake_artifact(DOC, IDS)
    rows = np.frombuffer(artifact.k, np.float32).copy()
    rows[-1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        store.put(DOC, key, replace(artifact, **{side: rows.tobytes()}))
    assert store.keys(DOC) == []


def test_a_buffer_of_the_wrong_size_is_refused(store):
    key, artifact = fake_artifact(DOC, IDS)
    with pytest.raises(ValueError, match=r"k has 380 bytes.*needs 384"):
        store.put(DOC, key, replace(artifact, k=artifact.k[:-4]))


def test_delete_removes_what_it_is_told_to_and_only_of_that_document(store):
    other = DocumentKey("acme", "other")
    keys = []
    for n in range(3):
        key, artifact = fake_artifact(DOC, [n])
        store.put(DOC, key, artifact)
        keys.append(key)
    shared, artifact = fake_artifact(other, [0])
    store.put(other, shared, artifact)
    assert shared == keys[0], "equal chunks of two documents have one key, and still two objects"
    assert store.delete(DOC, [keys[0], keys[1], "f" * 64]) == 2
    assert store.delete(DOC, [keys[0]]) == 0
    assert store.keys(DOC) == [keys[2]]
    assert store.keys(other) == [shared]


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_kv_10_a_header_of_any_size_around_the_ranged_read_is_inspected(blobs, delta):
    key, artifact = fake_artifact(DOC, IDS)
    data = kv_artifact.encode(artifact)
    store = KvStore(blobs, "fake", header_prefetch_nbytes=kv_artifact.header_end(data) + delta)
    store.put(DOC, key, artifact)
    assert store.inspect(DOC, key) == artifact.header


@pytest.mark.parametrize("prefetch", [8, 9, 1 << 20])
def test_kv_10_the_first_read_may_end_inside_the_header_or_behind_the_file(blobs, prefetch):
    key, artifact = fake_artifact(DOC, IDS)
    store = KvStore(blobs, "fake", header_prefetch_nbytes=prefetch)
    store.put(DOC, key, artifact)
    assert store.inspect(DOC, key) == artifact.header


@pytest.mark.parametrize("nbytes", [0, 7, 8, 100])
def test_inspecting_a_file_that_ends_in_its_header_is_a_miss(blobs, store, nbytes):
    key, artifact = fake_artifact(DOC, IDS)
    blobs.put_new(store.path(DOC, key), kv_artifact.encode(artifact)[:nbytes])
    assert reason(lambda: store.inspect(DOC, key)) is MissReason.TRUNCATED
    assert reason(lambda: get(store, DOC, key)) is MissReason.TRUNCATED


def test_a_store_that_fails_is_a_miss_for_readers_and_an_error_for_writers(blobs):
    """Serving goes on without the artifact; the pipeline has to try again."""
    key, artifact = fake_artifact(DOC, IDS)
    calls = ("view", "get_range", "put_new")
    broken = KvStore(with_faults(blobs, *(CrashPoint(c, fault=BlobError("down"), times=9) for c in calls)), "fake")
    assert reason(lambda: get(broken, DOC, key)) is MissReason.STORE
    assert reason(lambda: broken.inspect(DOC, key)) is MissReason.STORE
    with pytest.raises(BlobError, match="down"):
        broken.put(DOC, key, artifact)


def test_a_put_whose_answer_was_lost_is_there_when_it_is_tried_again(blobs):
    key, artifact = fake_artifact(DOC, IDS)
    store = KvStore(with_faults(blobs, CrashPoint("put_new", fault=BlobError("time-out"), after=True)), "fake")
    with pytest.raises(BlobError, match="time-out"):
        store.put(DOC, key, artifact)
    assert store.put(DOC, key, artifact) is False
    assert bytes(get(store, DOC, key).k) == artifact.k


def test_a_delete_takes_along_what_a_killed_writer_left_of_the_document(tmp_path):
    """Invisible to a list, but bytes of a document that must be gone; also where there is nothing else to delete."""
    store = KvStore(open_blobs(tmp_path.as_uri()), "fake")
    key, artifact = fake_artifact(DOC, IDS)
    staged = tmp_path / (store.path(DOC, key) + "#1")
    for keys in ([key], []):
        store.put(DOC, key, artifact)
        staged.write_bytes(b"half")
        store.delete(DOC, keys)
        assert not staged.exists()
    assert store.keys(DOC) == [key]


WRITER = """
import sys
from schemas.ids import DocumentKey
from stores.blobs import open_blobs
from stores.fakes import fake_artifact, fake_fingerprint
from stores.kv_store import KvStore
store = KvStore(open_blobs(sys.argv[1]), "fake")
fingerprint = fake_fingerprint(n_layers=30, head_dim=64, rotary_dim=64)
print("ready", flush=True)
n = 0
while True:
    document = DocumentKey("acme", "d")
    key, artifact = fake_artifact(document, [n] * 64, fingerprint=fingerprint)
    store.put(document, key, artifact)
    print(key, n, flush=True)
    n += 1
"""


def test_kv_01_a_reader_never_sees_part_of_what_a_killed_writer_wrote(tmp_path):
    """A failed write stayed visible, and later reads gave gibberish."""
    document = DocumentKey("acme", "d")
    fingerprint = fake_fingerprint(n_layers=30, head_dim=64, rotary_dim=64)
    store = KvStore(open_blobs(tmp_path.as_uri()), "fake")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path.as_uri()], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "ready\n"
        acknowledged = [writer.stdout.readline().split() for _ in range(5)]
        writer.kill()
        acknowledged += [line.split() for line in writer.stdout.read().splitlines() if len(line.split()) == 2]
    ids = {key: [int(n)] * 64 for key, n in acknowledged}
    for key in store.keys(document):
        header = store.inspect(document, key)
        store.get(document, key, fingerprint=fingerprint.digest, token_sha256=header.token_sha256)
    assert ids.keys() <= set(store.keys(document))
    store.delete(document, store.keys(document))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_kv_09_kv_13_reading_while_others_put_and_delete_gives_all_or_a_clean_miss(blobs, store):
    """An object that goes during a read must not come as half an object."""
    key, artifact = fake_artifact(DOC, list(range(2000)))
    done = threading.Event()

    def churn():
        for _ in range(25):
            store.put(DOC, key, artifact)
            store.delete(DOC, [key])
        done.set()

    def read():
        outcomes = set()
        while not done.is_set():
            try:
                got = get(store, DOC, key, list(range(2000)))
                outcomes.add("whole" if bytes(got.k) == artifact.k else "torn")
            except ArtifactMiss as miss:
                outcomes.add(miss.reason)
        return outcomes

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        pool.submit(churn).result()
        outcomes = set().union(*(reader.result() for reader in readers))
    assert outcomes <= {"whole", MissReason.MISSING}


READER = """
import resource, sys
from schemas.ids import DocumentKey
from stores.blobs import open_blobs
from stores.fakes import fake_fingerprint
from stores.kv_store import KvStore
store, document = KvStore(open_blobs(sys.argv[1]), "fake"), DocumentKey("acme", "d")
fingerprint = fake_fingerprint(n_layers=30, head_dim=64, rotary_dim=64).digest
keys = store.keys(document)
digests = [store.inspect(document, key).token_sha256 for key in keys]
[size] = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + int(sys.argv[2]),) * 2)
for key, digest in zip(keys, digests):
    store.get(document, key, fingerprint=fingerprint, token_sha256=digest)
print(len(keys))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is set beside what /proc says is in use")
def test_kv_08_200_artifacts_are_read_in_less_address_space_than_they_have_bytes(tmp_path):
    """Files that stay mapped, or bytes that stay in memory, end a reader on a host with little of it."""
    document = DocumentKey("acme", "d")
    fingerprint = fake_fingerprint(n_layers=30, head_dim=64, rotary_dim=64)
    store = KvStore(open_blobs(tmp_path.as_uri()), "fake")
    for n in range(200):
        store.put(document, *fake_artifact(document, [n] * 32, fingerprint=fingerprint))
    limit = store.nbytes(document) // 3
    read = subprocess.run(
        [sys.executable, "-c", READER, tmp_path.as_uri(), str(limit)],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # else each thread sets some aside, and the limit would be loose
        capture_output=True,
        text=True,
        check=False,
    )
    assert (read.stdout, read.stderr) == ("200\n", "")
