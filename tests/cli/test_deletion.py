"""`kvquilt doc delete` and `doc receipt` against a service that answers from a script."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.context import Context, Format
from cli.doc import delete_many, receipt
from schemas.errors import InputError, KvquiltError, RequestError
from schemas.settings import load_settings


@contextmanager
def service(answers):
    """Answers each request with the next of `answers`; gives its address and what was asked."""
    asked, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked.append((self.command, self.path, json.loads(body) if body else None))
            status, value = left.pop(0)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def context(url, format=Format.JSON):
    return Context(load_settings({"client": {"url": url}}), format, quiet=True)


def state(name, missing=(), left=0):
    count = {"place": "vectors/index", "found": 3, "deleted": 3 - left, "left": left}
    times = {"asked_ms": 1000, "invisible_ms": 2000, "complete_ms": 3000 if name == "COMPLETE" else None}
    return {"doc_id": "a/b", "version": 2, "state": name, "counts": [count], "missing": list(missing), **times}


def not_found():
    return {"error": {"message": "no deletion", "type": "not_found", "code": "receipt_not_found"}}


def test_a_filter_keeps_the_types_of_its_values(capsys):
    with service([(202, {"deletions": [], "next": None})]) as (url, asked):
        delete_many(context(url), ["team=blue", "year=2024", "open=true", 'code="7"', "path=a=b"], None)
    wanted = {"team": "blue", "year": 2024, "open": True, "code": "7", "path": "a=b"}
    assert asked == [("POST", "/v1/documents/delete", {"filter": wanted, "after": None})]
    assert json.loads(capsys.readouterr().out) == {"deletions": []}


def test_a_filter_that_is_none_is_refused_before_anything_is_asked():
    with pytest.raises(InputError, match="--filter blue: expected key=value"):
        delete_many(context("http://127.0.0.1:9"), ["blue"], None)


def test_a_deletion_of_many_goes_on_until_there_are_no_more(capsys):
    pages = [(202, {"deletions": [{"doc_id": name}], "next": after}) for name, after in (("a", "n1"), ("b", None))]
    with service(pages) as (url, asked):
        delete_many(context(url, Format.TERMINAL), [], "acme")
    assert [body["after"] for _, _, body in asked] == [None, "n1"]
    assert asked[0][2] == {"all": True, "confirm": "acme", "after": None}
    assert capsys.readouterr().out.splitlines()[1:] == ["  a", "  b"]


def test_a_receipt_is_shown_with_counts_and_what_is_missing(capsys):
    with service([(200, state("PENDING", ["1 left in vectors/index"], left=1))]) as (url, asked):
        receipt(context(url, Format.TERMINAL), "a/b", 2, None)
    assert asked == [("GET", "/v1/documents/a%2Fb/receipt?version=2", None)]
    assert capsys.readouterr().out.splitlines() == [
        "a/b  deletion at version 2  PENDING",
        "  asked         1970-01-01 00:00:01.000+00:00",
        "  invisible by  1970-01-01 00:00:02.000+00:00",
        "  complete      not yet",
        "  vectors/index 3 found, 2 deleted, 1 left",
        "  missing: 1 left in vectors/index",
    ]


def test_waiting_for_a_receipt_ends_when_it_is_complete(capsys):
    """A deletion that was just published is not known for a moment: that is no error then."""
    answers = [(404, not_found()), (200, state("PENDING", ["x"])), (200, state("COMPLETE"))]
    with service(answers) as (url, asked):
        receipt(context(url), "a/b", None, 60)
    assert len(asked) == 3
    assert json.loads(capsys.readouterr().out)["state"] == "COMPLETE"


def test_without_waiting_an_unknown_deletion_is_an_error():
    with service([(404, not_found())]) as (url, _), pytest.raises(RequestError, match="no deletion"):
        receipt(context(url), "a/b", None, None)


def test_a_receipt_that_stays_pending_fails_and_says_what_is_missing(capsys):
    answer = (200, state("PENDING", ["the prefill pipeline has not passed"]))
    said = r"not complete after 1e-06 s: the prefill pipeline has not passed"
    with service([answer]) as (url, _), pytest.raises(KvquiltError, match=said):
        receipt(context(url), "a/b", None, 1e-6)
    assert json.loads(capsys.readouterr().out)["state"] == "PENDING"


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_a_filter_that_json_cannot_say_is_one_sentence(value):
    """Bug: it ended in a traceback of the HTTP client."""
    with pytest.raises(InputError, match=r"--filter a=.* cannot be written as JSON"):
        delete_many(context("http://127.0.0.1:9"), [f"a={value}"], None)
