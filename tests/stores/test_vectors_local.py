"""Qdrant's local mode in one process, and what happens when a server is old, silent or absent."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from schemas.errors import VectorIndexError
from schemas.ids import DocumentKey
from schemas.settings import QdrantSettings
from stores.vectors import open_index

DIM = 8
DOC = DocumentKey("acme", "a")
SETTINGS = QdrantSettings(prefix="t", timeout_s=1)

CHILD = """
import sys, numpy as np
from schemas.chunk import Chunk, IndexedChunk
from schemas.ids import DocumentKey
from schemas.settings import QdrantSettings
from stores.fakes import kill
from stores.vectors import open_index
index = open_index(QdrantSettings(prefix="t"), sys.argv[1], "gen", 8)
index.ensure()
document = DocumentKey("acme", "a")
chunks = [IndexedChunk(Chunk(document, 1, n, "x", 0, 1, (n,)), "k", np.ones((1, 8), np.float32)) for n in range(50)]
index.upsert(chunks)
index.delete([chunk.chunk.id for chunk in chunks[40:]])
index.mark_kv([chunk.chunk.id for chunk in chunks[:7]], True)
print(index.count(document), flush=True)
if sys.argv[2] == "kill":
    kill()
sys.stdin.read()
"""


def child(folder, then):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), then], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_one_folder_in_one_process_is_one_store_until_the_last_handle_is_closed(tmp_path, make_head):
    """Both pipelines and the service open the same folder; a second client of Qdrant's would be refused."""
    first = open_index(SETTINGS, str(tmp_path / "q"), "gen", DIM)
    second = open_index(SETTINGS, str(tmp_path / "." / "q"), "gen", DIM)
    first.ensure()
    first.flip(make_head(DOC, 3))
    first.close()
    first.close()
    assert second.heads([DOC])[DOC].version == 3
    second.close()
    with pytest.raises(VectorIndexError, match="closed"):
        second.heads([DOC])
    with open_index(SETTINGS, str(tmp_path / "q"), "gen", DIM) as third:
        assert third.heads([DOC])[DOC].version == 3


def test_memory_is_one_space_per_name_and_gone_with_its_last_handle(make_head):
    with open_index(SETTINGS, ":memory:x", "gen", DIM) as one, open_index(SETTINGS, ":memory:x", "gen", DIM) as two:
        one.ensure()
        one.flip(make_head(DOC, 3))
        assert two.heads([DOC])[DOC].version == 3
        with open_index(SETTINGS, ":memory:y", "gen", DIM) as other:
            other.ensure()
            assert other.heads([DOC]) == {}
    with open_index(SETTINGS, ":memory:x", "gen", DIM) as again:
        again.ensure()
        assert again.heads([DOC]) == {}


def test_two_generations_in_one_folder_do_not_see_each_other(tmp_path, make_chunks):
    with (
        open_index(SETTINGS, str(tmp_path), "gen1", DIM) as one,
        open_index(SETTINGS, str(tmp_path), "gen2", 2 * DIM) as two,
    ):
        one.ensure()
        two.ensure()
        one.upsert(make_chunks(DOC, 1, 2))
        assert (one.count(DOC), two.count(DOC)) == (2, 0)


def test_a_second_process_is_told_who_has_the_folder(tmp_path):
    with child(tmp_path, "wait") as running:
        assert running.stdout.readline() == "40\n"
        with pytest.raises(VectorIndexError, match=r"in use by another process.*qdrant\.url"):
            open_index(SETTINGS, str(tmp_path), "gen", DIM)
        running.kill()
    open_index(SETTINGS, str(tmp_path), "gen", DIM).close()


def test_writes_that_returned_survive_a_kill(tmp_path):
    """Commits are batched for speed; a batch that was only in memory would lose points whose offsets are committed."""
    with child(tmp_path, "kill") as running:
        assert running.stdout.readline() == "40\n"
    with open_index(SETTINGS, str(tmp_path), "gen", DIM) as index:
        index.ready()
        chunks = index.chunks(DOC, 1)
        assert [c.chunk.ordinal for c in chunks] == list(range(40))
        assert [c.kv_ready for c in chunks] == [True] * 7 + [False] * 33


def test_the_commits_of_a_call_are_in_the_database_file_when_it_returns(tmp_path, make_chunks):
    """Guards the reach into the client's storage: after a release that keeps points in another way, look again.

    The copy has no write-ahead log: what was not checkpointed, and so not waited for, is not in it.
    """
    with open_index(SETTINGS, str(tmp_path / "q"), "gen", DIM) as index:
        index.ensure()
        chunks = make_chunks(DOC, 1, 5)
        index.upsert(chunks)
        index.delete([chunks[0].chunk.id])
        (folder,) = (tmp_path / "q").rglob("t_gen_chunks")
        assert (folder / "storage.sqlite-wal").exists()
        shutil.copy(folder / "storage.sqlite", tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy")) as copy:
        assert copy.execute("SELECT count(*) FROM points").fetchone() == (4,)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(VectorIndexError, match="file/q for Qdrant's local mode cannot be used"):
        open_index(SETTINGS, str(tmp_path / "file" / "q"), "gen", DIM)


def test_a_server_that_is_not_there_is_an_error_with_its_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with open_index(SETTINGS, url, "gen", DIM) as index, pytest.raises(VectorIndexError, match=f"{url} failed"):
        index.ready()


def test_a_server_that_does_not_answer_is_given_up_after_the_time_out():
    """Without a time-out one stuck connection stops the pipeline without a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with open_index(SETTINGS, url, "gen", DIM) as index, pytest.raises(VectorIndexError, match="timed out"):
            index.heads([DOC])


class OldServer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"title": "qdrant", "version": "1.15.4", "commit": "x"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_server_that_would_ignore_the_condition_of_an_upsert_is_refused():
    """Before 1.16 `update_filter` is an unknown field, which is ignored: a head could move backwards."""
    with HTTPServer(("127.0.0.1", 0), OldServer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with open_index(SETTINGS, url, "gen", DIM) as index:
                for call in (index.ensure, index.ready):
                    with pytest.raises(VectorIndexError, match=r"version 1\.15\.4; 1\.16 or newer is needed"):
                        call()
        finally:
            server.shutdown()
            thread.join()
