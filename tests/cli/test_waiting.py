"""Waiting ends when text and KV of the wanted version are servable, and not before."""

import pytest

from cli.waiting import Wanted, wait_servable
from schemas.errors import KvquiltError, RequestError


class Service:
    """A service whose documents go through the states that a test lists; the last one stays."""

    def __init__(self, **states):
        self.states = {doc_id: list(steps) for doc_id, steps in states.items()}

    def status(self, doc_id):
        steps = self.states[doc_id]
        return steps.pop(0) if len(steps) > 1 else steps[0]


def at(version, chunks=2, kv_ready=2):
    return {"version": version, "chunks": chunks, "kv_ready": kv_ready}


def wait(service, wanted, **options):
    return wait_servable(service, wanted, timeout_s=options.pop("timeout_s", 30), poll_s=0, **options)


def test_a_document_is_ready_when_its_version_has_all_its_kv():
    """Bug: the old version's KV counted for the new one."""
    seen = []
    service = Service(a=[None, at(1), at(2, kv_ready=1), at(2, kv_ready=1), at(2)])
    reached = wait(service, {"a": Wanted(2)}, report=lambda r: seen.append((len(r.text), len(r.kv))))
    assert reached.kv == ["a"]
    assert seen == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1)]


def test_a_deletion_is_reached_without_chunks():
    assert wait(Service(a=[at(1), at(2, 0, 0)]), {"a": Wanted(2, deleted=True)}).kv == ["a"]


def test_a_newer_version_ends_the_wait_and_is_named():
    """Bug: `publish --wait` of an older version said that it was servable."""
    reached = wait(Service(a=[at(5)]), {"a": Wanted(2)})
    assert (reached.text, reached.kv, reached.superseded) == ([], [], {"a": 5})


def test_a_service_that_is_not_ready_is_waited_for():
    """Bug: `publish --wait` right after `up` ended with "the model is being loaded"."""

    class Starting(Service):
        refusals = 2

        def status(self, doc_id):
            if self.refusals:
                self.refusals -= 1
                raise RequestError("the model is being loaded", status=503, code="not_ready")
            return super().status(doc_id)

    assert wait(Starting(a=[at(2)]), {"a": Wanted(2)}).kv == ["a"]


def test_more_documents_than_are_asked_for_at_once_are_all_waited_for():
    names = [f"d{n}" for n in range(100)]
    reached = wait(Service(**{name: [at(1)] for name in names}), {name: Wanted(1) for name in names})
    assert reached.kv == names


def test_a_dead_letter_ends_the_wait_for_its_document():
    """Bug: a refused document kept `publish --wait` waiting until its time-out, without a reason."""
    reached = wait(
        Service(a=[at(1)], bad=[None]), {"a": Wanted(1), "bad": Wanted(1)}, refusals=lambda: {"bad": "content: empty"}
    )
    assert (reached.kv, reached.refused) == (["a"], {"bad": "content: empty"})


def test_giving_up_names_what_is_missing():
    with pytest.raises(KvquiltError, match="1 of 1 documents are not servable after 0 s, 'a' among them"):
        wait(Service(a=[None]), {"a": Wanted(1)}, timeout_s=0)
