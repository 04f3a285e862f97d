"""What the tests of formats read from: a schema registry and a web server of our own, on loopback, and messages."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from ingest.formats import EventReader
from schemas.settings import EventSettings, FetchSettings, RegistrySettings
from stores.topics import Message

GOLDEN = Path(__file__).parent / "golden"
CONFLUENT = json.loads((GOLDEN / "confluent.json").read_text())
PDFS = {name: base64.b64decode(text) for name, text in json.loads((GOLDEN / "pdfs.json").read_text()).items()}
NOW_MS = 1_700_000_000_000


def message(value, key=b"d", headers=(), offset=7, timestamp_ms=NOW_MS):
    if isinstance(value, dict | list):
        value = json.dumps(value).encode()
    pairs = headers.items() if isinstance(headers, dict) else headers
    pairs = tuple((name, text.encode() if isinstance(text, str) else text) for name, text in pairs)
    return Message("documents", 0, offset, timestamp_ms, key, value, pairs)


def golden(name):
    """A value as confluent-kafka's serialiser wrote it."""
    return base64.b64decode(CONFLUENT["messages"][name]["value"])


def framed(schema_id, payload):
    return b"\x00" + schema_id.to_bytes(4, "big") + payload


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class _Server:
    """An HTTP server in a thread; remembers the paths that were asked for."""

    def __init__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.asked.append(self.path)
                outer.headers = dict(self.headers.items())
                with contextlib.suppress(ConnectionError):
                    outer.answer(self)

            def log_message(self, *_):
                pass

        self.asked = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(handler, status, body=b"", headers=()):
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), "Connection": "close", **dict(headers)}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class RegistryServer(_Server):
    """Confluent's REST API, as far as reading schemas goes. `schemas`: id -> {schemaType, schema, references}."""

    def __init__(self):
        super().__init__()
        self.schemas = {int(number): dict(schema) for number, schema in CONFLUENT["schemas"].items()}
        self.subjects = {name: int(number) for name, number in CONFLUENT["subjects"].items()}
        self.status = 200
        self.token = None

    def add(self, schema, kind="AVRO", references=()):
        number = max(self.schemas) + 1
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.schemas[number] = {"schemaType": kind, "schema": text, "references": list(references)}
        return number

    def answer(self, handler):
        url = urlsplit(handler.path)
        if self.token and handler.headers.get("Authorization") != self.token:
            return self._say(handler, 401, 40101, "Unauthorized")
        if self.status != 200:
            return send(handler, self.status, b"<html>something else</html>")
        serialized = parse_qs(url.query).get("format") == ["serialized"]
        if found := re.fullmatch(r"/schemas/ids/(\d+)", url.path):
            number = int(found[1])
        elif found := re.fullmatch(r"/subjects/([^/]+)/versions/(\d+)", url.path):
            number = self.subjects.get(f"{unquote(found[1])}/{found[2]}", -1)
        else:
            return self._say(handler, 404, 404, "HTTP 404 Not Found")
        if number not in self.schemas:
            return self._say(handler, 404, 40403, f"Schema {number} not found")
        answer = dict(self.schemas[number])
        if answer["schemaType"] == "PROTOBUF" and not serialized:
            answer["schema"] = 'syntax = "proto3";'  # the source text, which only a compiler could read
        if answer["schemaType"] == "AVRO":
            del answer["schemaType"]  # as the real one does
        if not answer["references"]:
            del answer["references"]
        return send(handler, 200, json.dumps(answer).encode())

    def _say(self, handler, status, code, text):
        send(handler, status, json.dumps({"error_code": code, "message": text}).encode())


class WebServer(_Server):
    """Files by path; a value that is a function answers itself."""

    def __init__(self):
        super().__init__()
        self.files = {}

    def answer(self, handler):
        found = self.files.get(urlsplit(handler.path).path)
        if found is None:
            return send(handler, 404, b"nothing")
        if callable(found):
            return found(handler)
        return send(handler, 200, found)


@dataclass
class Formats:
    """A reader with everything around it."""

    registry: RegistryServer
    web: WebServer
    folder: Path
    readers: list = field(default_factory=list)

    def settings(self, **changes):
        fetch = FetchSettings(
            allow=(self.web.url, "http://localhost:9", "https://files.example", self.folder.as_uri()),
            private_hosts=("127.0.0.1",),
            max_bytes=100_000,
            timeout_s=5,
        )
        return EventSettings(**{"registry": RegistrySettings(url=self.registry.url), "fetch": fetch, **changes})

    def reader(self, **changes):
        self.readers.append(EventReader(self.settings(**changes)))
        return self.readers[-1]

    def put(self, name, content):
        """A file on the web server; its URI and digest."""
        self.web.files[name] = content
        return {"uri": self.web.url + name, "sha256": sha256(content)}


@contextlib.contextmanager
def formats_world(folder):
    formats = Formats(RegistryServer(), WebServer(), folder)
    try:
        yield formats
    finally:
        for reader in formats.readers:
            reader.close()
        formats.registry.close()
        formats.web.close()
