"""The object store: the same contract in memory, in a folder and on S3."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from obstore.store import MemoryStore

from schemas.errors import BlobError, SettingsError
from stores.blobs import Blobs, open_blobs

BIG = os.urandom(6 * 1024 * 1024)  # more than one part of a multipart upload


def test_a_store_that_was_just_opened_is_ready_and_empty(blobs):
    blobs.ready()
    assert blobs.list("") == []
    assert (blobs.get("a/b"), blobs.view("a/b"), blobs.size("a/b"), blobs.get_range("a/b", 0, 5)) == (None,) * 4


@pytest.mark.parametrize("data", [b"", b"x", BIG], ids=["empty", "one byte", "6 MiB"])
def test_an_object_comes_back_as_it_was_put(blobs, data):
    assert blobs.put_new("a/b.bin", data) is True
    assert blobs.get("a/b.bin") == data
    assert blobs.view("a/b.bin") == data
    assert blobs.size("a/b.bin") == len(data)
    assert blobs.list("a") == [("a/b.bin", len(data))]


def test_bytes_that_are_no_bytes_object_can_be_put(blobs):
    assert blobs.put_new("m", memoryview(b"0123456789")[2:5])
    assert blobs.put_new("n", bytearray(b"ab"))
    assert (blobs.get("m"), blobs.get("n")) == (b"234", b"ab")


def test_kv_09_a_second_put_changes_nothing_and_says_so(blobs):
    """Overwriting would change bytes under a reader, and let a late writer replace a checked object."""
    assert blobs.put_new("a/b", b"first")
    assert blobs.put_new("a/b", b"second!") is False
    assert blobs.get("a/b") == b"first"


@pytest.mark.parametrize("blobs", ["memory", "folder"], indirect=True)
@pytest.mark.parametrize("size", [10, len(BIG)], ids=["small", "6 MiB"])
def test_of_many_writers_exactly_one_creates_the_object(blobs, size):
    """Not on moto, which looks first and writes then: several writers win there (seen). For S3 itself see below."""
    writers = 8
    for round_ in range(3):
        gate = threading.Barrier(writers)

        def put(n, round_=round_, gate=gate):
            body = bytes([n]) * size
            gate.wait()
            return blobs.put_new(f"race/{round_}", body)

        with ThreadPoolExecutor(writers) as pool:
            won = list(pool.map(put, range(writers)))
        assert won.count(True) == 1
        assert blobs.get(f"race/{round_}") == bytes([won.index(True)]) * size


class VagueS3(BaseHTTPRequestHandler):
    """Refuses every put without saying why; has the objects whose key ends in `there`."""

    def do_PUT(self):
        self.server.conditions.append(self.headers["If-None-Match"])
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(400)

    def do_HEAD(self):
        self._answer(200 if self.path.endswith("there") else 404)

    def _answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_create_conflict_that_s3_reports_as_some_error_is_decided_by_looking():
    """A conflict on a large body can surface as a generic error: a lost race is no failure, and a failure no race."""
    with HTTPServer(("127.0.0.1", 0), VagueS3) as server:
        server.conditions = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "skip_signature": "true"}
            blobs = open_blobs("s3://bucket", options)
            assert blobs.put_new("kv/there", b"x") is False
            with pytest.raises(BlobError, match="kv/absent was not written"):
                blobs.put_new("kv/absent", b"x")
            assert server.conditions == ["*", "*"], "the put must be conditional on the server, or it overwrites"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 1, b"0"),
        (0, 10, b"0123456789"),
        (3, 7, b"3456"),
        (8, 99, b"89"),
        (9, 10, b"9"),
        (10, 11, b""),
        (50, 60, b""),
    ],
)
def test_a_range_is_half_open_and_ends_with_the_object(blobs, start, end, expected):
    blobs.put_new("r", b"0123456789")
    assert blobs.get_range("r", start, end) == expected


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (4, 3)])
def test_an_impossible_range_is_refused(blobs, start, end):
    with pytest.raises(ValueError, match="range must be 0 <= start < end"):
        blobs.get_range("r", start, end)


def test_list_goes_by_whole_segments_and_is_sorted(blobs):
    """A prefix that matched half a segment would list, and delete, another document's objects."""
    for key in ("kv/ab/2", "kv/ab/10", "kv/abc/1", "kv/ab/deep/er/x", "other"):
        blobs.put_new(key, b"12")
    assert [key for key, _ in blobs.list("kv/ab")] == ["kv/ab/10", "kv/ab/2", "kv/ab/deep/er/x"]
    assert blobs.list("kv/ab/") == blobs.list("kv/ab")
    assert len(blobs.list("")) == 5
    assert blobs.list("kv/a") == []


def test_list_gives_all_of_more_objects_than_one_page_holds(blobs):
    keys = [f"many/{n:04}" for n in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: blobs.put_new(key, b"x"), keys))
    assert [key for key, _ in blobs.list("many")] == keys
    assert blobs.delete(keys) == 1005
    assert blobs.list("") == []


def test_delete_counts_what_was_there_and_takes_absent_keys_for_deleted(blobs):
    """Deletes are repeated after a crash; a receipt counts what they removed."""
    for key in ("a/1", "a/2", "b/1"):
        blobs.put_new(key, b"x")
    assert blobs.delete(["a/1", "a/1", "b/1", "b/none", "c/none"]) == 2
    assert blobs.delete(["a/1"]) == 0
    assert blobs.delete([]) == 0
    assert blobs.list("") == [("a/2", 1)]
    assert blobs.put_new("a/1", b"again")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "a b", "a#1", "ü", "x" * 251])
def test_a_key_that_a_store_would_change_is_refused(blobs, key):
    for call in (lambda: blobs.put_new(key, b"x"), lambda: blobs.get(key), lambda: blobs.delete([key])):
        with pytest.raises(ValueError, match="must be segments of 1 to 250"):
            call()


def test_a_segment_of_250_characters_is_fine(blobs):
    assert blobs.put_new("x" * 250, b"1")
    assert blobs.size("x" * 250) == 1


def test_creating_below_an_object_or_over_a_folder_is_never_a_silent_success(tmp_path):
    """On a folder a key cannot be an object and the folder of others; "existed" would mean a lost artifact."""
    blobs = open_blobs(tmp_path.as_uri())
    blobs.put_new("a/b", b"x")
    with pytest.raises(BlobError, match="a is the folder of other objects"):
        blobs.put_new("a", b"y")
    with pytest.raises(BlobError, match="a/b/c was not written"):
        blobs.put_new("a/b/c", b"y")


def test_an_empty_folder_is_removed_with_its_last_object_and_not_the_store(tmp_path):
    """The name of a folder is a document's digest: a complete delete leaves none behind."""
    blobs = open_blobs((tmp_path / "store").as_uri())
    blobs.put_new("kv/g/t/d/1", b"x")
    blobs.delete(["kv/g/t/d/1"])
    assert (tmp_path / "store").is_dir()
    assert list((tmp_path / "store").iterdir()) == []
    assert blobs.put_new("kv/g/t/d/1", b"x")


def test_puts_and_deletes_in_one_folder_do_not_get_in_each_others_way(tmp_path):
    """A delete that empties a folder removes it, under a put that is just about to write there."""
    blobs = open_blobs(tmp_path.as_uri())

    def churn(n):
        for round_ in range(60):
            key = f"kv/d/{n}-{round_}"
            assert blobs.put_new(key, b"x")
            assert blobs.delete([key]) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert blobs.list("") == []


KILLED = """
import sys
from stores.blobs import Blobs, open_blobs
from stores.fakes import kill
import obstore
def parts():
    yield b"x" * 6_000_000
    kill()
blobs = open_blobs(sys.argv[1])
obstore.put(blobs._store, "kv/d/torn", parts(), use_multipart=True, chunk_size=1_000_000, max_concurrency=1)
"""


def test_kv_01_kv_06_a_writer_that_is_killed_in_the_middle_leaves_nothing_visible_and_sweep_removes_the_rest(tmp_path):
    """Readers took half-written files for whole ones; and what is left of one is a deleted document's content."""
    blobs = open_blobs(tmp_path.as_uri())
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path.as_uri()]).returncode == -9
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) == 1, "the writer was killed before it wrote, the test shows nothing"
    assert blobs.list("") == []
    assert blobs.get("kv/d/torn") is None
    assert blobs.put_new("kv/d/torn", b"whole")
    assert blobs.sweep("kv/other") == 0
    assert blobs.sweep("kv/d") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "kv" / "d" / "torn"]
    assert blobs.get("kv/d/torn") == b"whole"


def test_sweep_has_nothing_to_do_where_torn_writes_cannot_be_left(blobs):
    blobs.put_new("kv/d/1", b"x")
    assert blobs.sweep("kv") == 0
    assert blobs.sweep("nothing") == 0
    assert blobs.get("kv/d/1") == b"x"


def test_memory_is_one_store_per_url_and_process():
    """The pipelines and the service open the store on their own and must meet."""
    open_blobs("memory://shared").put_new("a", b"1")
    assert open_blobs("memory://shared").get("a") == b"1"
    assert open_blobs("memory://other").get("a") is None


@pytest.mark.parametrize("url", ["", "/data/blobs", "ftp://host/x", "blobs", "file://host/x", "file:relative"])
def test_a_url_that_names_no_store_is_a_settings_error(url):
    with pytest.raises(SettingsError, match=r"blobs\.url"):
        open_blobs(url)


def test_an_unknown_option_is_a_settings_error_that_does_not_print_secrets():
    with pytest.raises(SettingsError, match=r"blobs\.options") as error:
        open_blobs("s3://bucket", {"secret_access_key": "hush-hush", "no_such_option": "1"})
    assert "hush-hush" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_a_blob_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BlobError, match="the folder cannot be made"):
        open_blobs((tmp_path / "file" / "blobs").as_uri())


def test_a_folder_that_is_gone_is_not_ready(tmp_path):
    blobs = open_blobs((tmp_path / "blobs").as_uri())
    (tmp_path / "blobs").rmdir()
    with pytest.raises(BlobError, match="the folder is missing"):
        blobs.ready()


@pytest.mark.service
def test_a_bucket_that_is_missing_is_not_ready_and_refuses_writes(s3_bucket):
    """A missing bucket answers 404, as a missing object does: it must not look like an empty store."""
    _, options = s3_bucket
    blobs = open_blobs("s3://no-such-bucket/prefix", options)
    with pytest.raises(BlobError, match="NoSuchBucket"):
        blobs.ready()
    with pytest.raises(BlobError, match="was not written"):
        blobs.put_new("a", b"x")


@pytest.mark.service
def test_a_prefix_keeps_two_stores_in_one_bucket_apart(s3_bucket):
    url, options = s3_bucket
    one, two = open_blobs(url + "/one", options), open_blobs(url + "/two", options)
    one.put_new("a", b"1")
    assert two.get("a") is None
    assert one.list("") == [("a", 1)]


def test_errors_name_the_store_without_its_password():
    assert Blobs("s3://svc:hunter2@bucket/x", MemoryStore()).place == "s3://bucket/x"
