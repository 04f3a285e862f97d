"""Malformed events of every format and what their dead letters say: tested, and the table of docs/events.md.

Each case is a function of the `Formats` world that gives a message, and a part of what the letter must say.
"""

import base64
import io
import json

import fastavro

from schemas.settings import FieldSettings
from tests.ingest.formats_world import NOW_MS, PDFS, framed, golden, message, sha256

FIELDS = FieldSettings(id="id")  # what the cases of rows are read with

CE = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/test", "ce_type": "changed"}
STRUCTURED = {"specversion": "1.0", "id": "1", "source": "/test", "type": "changed"}
SOURCE = {"lsn": 100, "ts_ms": NOW_MS}
PLACEHOLDER = "__debezium_unavailable_value"


def own(**fields):
    return {"content": "a text", **fields}


def pdf(content):
    return own(content=base64.b64encode(content).decode(), content_type="pdf")


def binary(value, headers=(), **more):
    return message(value, headers={**CE, **dict(headers)}, **more)


def structured(headers=(), **fields):
    return message({**STRUCTURED, **fields}, headers={"content-type": "application/cloudevents+json", **dict(headers)})


def change(op="u", before=None, after=None, source=SOURCE, key=b'{"id": "d"}'):
    return message({"op": op, "before": before, "after": after, "source": source, "ts_ms": NOW_MS}, key=key)


def avro(schema, record):
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), record)
    return stream.getvalue()


def avro_document(world, **record):
    fields = [{"name": name, "type": "string" if isinstance(value, str) else "long"} for name, value in record.items()]
    schema = {"type": "record", "name": "Doc", "fields": fields}
    return framed(world.registry.add(schema), avro(schema, record))


def refers(world, content=b"a text", **changes):
    return message({**world.put("/doc.txt", content), **changes})


def redirects(world, target):
    def answer(handler):
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    reference = world.put("/moved", b"")
    world.web.files["/moved"] = answer
    return message(reference)


OWN = {
    "malformed JSON": (lambda w: message(b'{"content": "a text"'), "the value is not JSON"),
    "JSON that is no object": (lambda w: message([]), "must be a JSON object or null (got a JSON list)"),
    "bytes that are not UTF-8": (lambda w: message(b'{"content": "\xff"}'), "the value is not UTF-8"),
    "more than 8 MiB": (lambda w: message(own(content="x " * 10_000_000)), "bytes; at most 8,388,608 are accepted"),
    "a missing field": (lambda w: message({}), "content: Field required"),
    "a wrong type, also one that could be converted": (lambda w: message(own(version="3")), "valid integer (got '3')"),
    "an unknown field": (lambda w: message(own(contents="")), "contents: Extra inputs are not permitted"),
    "an unknown content type": (lambda w: message(own(content_type="docx")), "content_type: Input should be"),
    "an empty document, or one of white space": (lambda w: message(own(content=" \n")), "the document is empty"),
    "a NUL character": (lambda w: message(own(content="a\x00b")), "NUL character"),
    "half of a surrogate pair": (lambda w: message(own(content="\ud800")), "half of a surrogate pair"),
    "the same in metadata": (lambda w: message(own(metadata={"a": "\ud800"})), "cannot be written as JSON"),
    "a title or a URI of more than 4,096 characters": (
        lambda w: message(own(title="t" * 5000)),
        "title: String should have at most 4096 characters",
    ),
    "metadata of more than 64 KiB": (
        lambda w: message(own(metadata={"a": "b" * 70_000})),
        "at most 65,536 are accepted",
    ),
    "NaN": (lambda w: message(own(metadata={"a": float("nan")})), "NaN is not a JSON number"),
    "a future `schema_version`": (lambda w: message(own(schema_version=2)), "schema_version 2 is newer than 1"),
    "no key": (lambda w: message(own(), key=None), "the message has no key"),
    "a key that is not UTF-8": (lambda w: message(own(), key=b"caf\xe9"), "the message key is not UTF-8"),
    "a key of more than 512 characters": (lambda w: message(own(), key=b"k" * 600), "at most 512 characters"),
    "a `doc_id` that is not the key": (lambda w: message(own(doc_id="e")), "they must agree"),
    "a header `kvquilt.version` that is no number": (
        lambda w: message(None, headers={"kvquilt.version": "two"}),
        "must be decimal digits below 2^63",
    ),
    "a deletion whose header `kvquilt.tenant` has no value": (
        lambda w: message(None, headers={"kvquilt.tenant": None}),
        "kvquilt.tenant must name the tenant",
    ),
    "a deletion whose header `kvquilt.tenant` is not UTF-8": (
        lambda w: message(None, headers={"kvquilt.tenant": b"acm\xe9"}),
        "header kvquilt.tenant is not UTF-8",
    ),
    "a deletion whose key holds half of a surrogate pair": (
        lambda w: message(None, key=b'{"doc_id": "\\ud800", "tenant": "acme"}'),
        "doc_id: Input should be a valid string",
    ),
}

CLOUDEVENTS = {
    "another `specversion`": (lambda w: binary(b"{}", {"ce_specversion": "0.3"}), "specversion '0.3' cannot be read"),
    "no `type`": (lambda w: message({**STRUCTURED, "type": None, "data": {}}), "has no type"),
    "a deletion whose header `ce_tenant` has no value": (
        lambda w: binary(None, {"ce_tenant": None}),
        "attribute 'tenant' must name the tenant",
    ),
    "an attribute that is not UTF-8": (lambda w: binary(b"{}", {"ce_subject": b"\xff"}), "ce_subject is not UTF-8"),
    "a `partitionkey` that is not the key": (lambda w: structured(partitionkey="e", data=own()), "they must agree"),
    "no data, and no type that deletes": (lambda w: structured(), "the event has no data"),
    "`data` and `data_base64`": (lambda w: structured(data={}, data_base64=""), "expected one of them"),
    "`data_base64` that is none": (lambda w: structured(data_base64="a*b"), "data_base64 is not base64"),
    "data that is not JSON": (lambda w: binary(b"{"), "the value is not JSON"),
    "JSON data that is no object": (lambda w: structured(data=[1]), "must be a JSON object (got a JSON list)"),
    "data without content": (lambda w: structured(data={"title": "x"}), "content: the record has no such field"),
    "data of an unknown type": (
        lambda w: binary(b"x", {"content-type": "image/png"}),
        "datacontenttype 'image/png' cannot be read",
    ),
    "text in another character set than it says": (
        lambda w: binary(b"caf\xe9", {"content-type": "text/plain"}),
        "the data is not utf-8",
    ),
    "an unknown character set": (
        lambda w: binary(b"x", {"content-type": "text/plain; charset=rot13"}),
        "charset 'rot13' of the data cannot be read",
    ),
    "a PDF that is not in `data_base64`": (
        lambda w: structured(datacontenttype="application/pdf", data="%PDF-"),
        "must be in data_base64",
    ),
    "a `sequence` that is no whole number": (
        lambda w: binary(json.dumps(own()).encode(), {"ce_sequence": "1.5"}),
        "attribute 'sequence' must be a whole number",
    ),
    "a `time` without a zone": (
        lambda w: structured(time="2025-01-02T03:04:05", data=own()),
        "'time' must be a time of RFC 3339",
    ),
    "a batch": (
        lambda w: message([STRUCTURED], headers={"content-type": "application/cloudevents-batch+json"}),
        "must be a JSON object",
    ),
    "a structured event in another encoding": (
        lambda w: message(STRUCTURED, headers={"content-type": "application/cloudevents+avro"}),
        "content type 'application/cloudevents+avro' cannot be read",
    ),
}

DEBEZIUM = {
    "an operation on no single row": (lambda w: change("t"), "Debezium op 't' is not about one row"),
    "a change without `after`": (lambda w: change("u"), "must carry the row in `after`"),
    "no `source`": (lambda w: change(after=own(), source=None), "has no `source`"),
    "an `lsn` that is null": (lambda w: change(after=own(), source={"lsn": None}), "source.lsn must be a whole number"),
    "neither `lsn` nor `ts_ms`": (lambda w: change(after=own(), source={}), "neither 'lsn' nor a `ts_ms`"),
    "a row without content": (lambda w: change(after={"id": "d"}), "content: the record has no such field"),
    "a row whose tenant is null": (lambda w: change(after=own(tenant=None)), "field 'tenant' must name the tenant"),
    "a large column that the update left alone": (
        lambda w: change(after=own(content=PLACEHOLDER), before={"id": "d"}),
        "set REPLICA IDENTITY FULL",
    ),
    "a row with another id than the key": (lambda w: change(after=own(id="e")), "they must agree"),
    "a key without the id": (lambda w: change(after=own(), key=b'{"number": 7}'), "the message key has no field 'id'"),
    "an id that is no text and no whole number": (
        lambda w: change(after=own(), key=b'{"id": 1.5}'),
        "must be text or a whole number to be a document id",
    ),
}

CONFLUENT = {
    "less than five bytes": (lambda w: message(b"\x00\x00"), "has at least 5 bytes (got 2)"),
    "a schema id that the registry does not know": (
        lambda w: message(framed(4711, b"x")),
        "the schema registry does not know schema 4711",
    ),
    "a schema of another kind": (
        lambda w: message(framed(w.registry.add("{}", "XML"), b"x")),
        "is of type 'XML'; expected AVRO, JSON, PROTOBUF",
    ),
    "Avro: bytes that end too early": (lambda w: message(golden("avro")[:-9]), "the value does not fit schema 1"),
    "Avro: bytes left over": (lambda w: message(golden("avro") + b"xyz"), "3 bytes are left over"),
    "Avro: a value that is no record": (
        lambda w: message(framed(w.registry.add('"string"'), avro("string", "x"))),
        "must describe a record",
    ),
    "Avro: a record without content": (
        lambda w: message(avro_document(w, title="x")),
        "content: the record has no such field",
    ),
    "Avro: content that is no text": (
        lambda w: message(avro_document(w, content=5)),
        "content: Input should be a valid string",
    ),
    "Protobuf: bytes that end too early": (
        lambda w: message(golden("protobuf")[:-3]),
        "the value does not fit schema 4: DecodeError",
    ),
    "Protobuf: an index that names no message": (
        lambda w: message(framed(4, b"\x02\x0e")),
        "the schema has no Protobuf message at index [7]",
    ),
    "Protobuf: no index": (lambda w: message(framed(4, b"")), "ends within the index"),
    "JSON: malformed": (lambda w: message(golden("json")[:-1]), "the value is not JSON"),
    "JSON: no object": (lambda w: message(framed(2, b"[1]")), "must describe a record"),
    "a version that is negative": (
        lambda w: message(avro_document(w, content="x", version=-1)),
        "field 'version' must be a whole number",
    ),
}

REFERENCES = {
    "`sha256` without `uri`": (lambda w: message({"sha256": "0" * 64}), "uri: Field required"),
    "a `sha256` that is none": (lambda w: refers(w, sha256="abc"), "sha256: String should match pattern"),
    "a place that is not on the list": (
        lambda w: refers(w, uri="https://evil.example/doc"),
        "events.fetch.allow does not list its place",
    ),
    "another scheme": (lambda w: refers(w, uri="ftp://files.example/doc"), "the scheme must be one of"),
    "a path that climbs": (
        lambda w: refers(w, uri=w.folder.as_uri() + "/%2e%2e/passwd"),
        "a dot segment, a backslash or a control character",
    ),
    "a user name in the URI": (lambda w: refers(w, uri="https://a@files.example/"), "a user name or password"),
    "a host with a private address": (
        lambda w: refers(w, uri="http://localhost:9/doc"),
        "which is no public address",
    ),
    "a redirect to another host": (
        lambda w: redirects(w, "https://files.example/doc"),
        "redirects to another host",
    ),
    "nothing there": (lambda w: refers(w, uri=w.web.url + "/missing"), "the server answers 404"),
    "more than `events.fetch.max_bytes`": (lambda w: refers(w, b"x" * 200_000), "larger than events.fetch.max_bytes"),
    "another digest": (lambda w: refers(w, sha256=sha256(b"another text")), "the event says"),
    "text that is not UTF-8": (lambda w: refers(w, b"caf\xe9"), "what `uri` refers to is not UTF-8"),
    "a file that does not exist": (lambda w: refers(w, uri=w.folder.as_uri() + "/missing"), "does not exist"),
}

DOCUMENTS = {
    "a PDF that is not base64": (lambda w: message(own(content_type="pdf")), "the content of a PDF must be in base64"),
    "base64 of something else": (lambda w: message(pdf(b"GIF89a")), "the content is no PDF"),
    "a damaged PDF": (lambda w: message(pdf(PDFS["two pages"][:200])), "the PDF cannot be read"),
    "an encrypted PDF": (lambda w: message(pdf(PDFS["encrypted"])), "the PDF is encrypted"),
    "a PDF of images only": (lambda w: message(pdf(PDFS["no text"])), "run OCR over it first"),
    "HTML without visible text": (
        lambda w: message(own(content="<p hidden>x</p><script>y</script>", content_type="html")),
        "there is no text in the html",
    ),
    "HTML in another character set than it says": (
        lambda w: refers(w, b"<p>caf\xe9</p>", content_type="html"),
        "the HTML is not utf-8",
    ),
}

CASES = {
    "Our own JSON": OWN,
    "CloudEvents": CLOUDEVENTS,
    "Debezium": DEBEZIUM,
    "Avro, Protobuf and JSON with a schema id": CONFLUENT,
    "Content by reference": REFERENCES,
    "HTML and PDF": DOCUMENTS,
}
