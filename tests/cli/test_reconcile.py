"""`kvquilt reconcile`: what its table says, and the whole command on the embedded parts."""

import json

import pytest

from cli.context import Context, Format
from cli.embedded import embedded
from cli.reconcile import SHOWN, _lines, reconcile
from ingest.connect import ConnectStores, connected
from ingest.reconcile import Action, Finding, Kind, Report
from schemas.head import DocumentState, Head
from schemas.ids import DocumentKey
from schemas.settings import load_settings
from stores.fakes import fake_artifact


def test_where_everything_agrees_it_says_so():
    report = Report(settled=True, documents=2, points=12, objects=11, receipts=1)
    assert list(_lines(report, dry_run=False)) == [
        "2 documents, 12 points, 11 KV artifacts, 1 complete receipts",
        "everything agrees",
    ]


def test_drift_is_counted_by_kind_and_named_by_document():
    report = Report(settled=True)
    report.findings = [
        Finding(Kind.STALE_POINTS, "default/a", 3, Action.DELETED),
        Finding(Kind.STALE_POINTS, "default/b", 1, Action.DELETED),
        Finding(Kind.MISSING_KV, "default/b", 2, Action.ANNOUNCED, "the artifact is gone"),
    ]
    lines = list(_lines(report, dry_run=False))
    assert [line.split() for line in lines[2:4]] == [
        ["stale_points", "4", "2", "documents"],
        ["missing_kv", "2", "1", "documents"],
    ]
    assert lines[-1] == "  default/b: missing_kv 2, announced (the artifact is gone)"


def test_pipelines_that_are_behind_are_mentioned_and_a_long_list_is_cut():
    findings = [Finding(Kind.POINTS_AHEAD, f"default/{n}", 1, Action.NONE) for n in range(SHOWN + 5)]
    lines = list(_lines(Report(settled=False, findings=findings), dry_run=True))
    assert lines[1].startswith("the pipelines are behind")
    assert lines[-1] == "  and 5 more; --format json has them all"


@pytest.mark.slow
def test_the_command_runs_over_the_embedded_parts_and_finds_what_was_put_astray(tmp_path, capsys):
    """Everything real but the size of the model: broker, index, object store, generation."""
    from tests.ingest.tiny import make_tiny_model

    name = str(make_tiny_model(tmp_path / "model"))
    settings = load_settings({"data_dir": tmp_path / "data", "cache_dir": tmp_path / "cache", "model": {"name": name}})
    context = Context(settings, Format.JSON, quiet=True)
    reconcile(context, tenant=None, dry_run=False, grace_s=5)
    assert json.loads(capsys.readouterr().out)["findings"] == []

    document = DocumentKey("default", "lake")
    with embedded(settings) as own, connected(connect := ConnectStores(own.settings)):
        parts = connect()
        head = Head(
            tenant="default", doc_id="lake", version=3, state=DocumentState.DELETED, generation=parts.generation.name,
            content_digest="c", n_chunks=0, event_ms=1, committed_ms=2,
        )  # fmt: skip
        parts.index.flip(head)
        key, artifact = fake_artifact(document, [1, 2], generation=parts.generation.name)
        parts.kv.put(document, key, artifact)

    reconcile(context, tenant=None, dry_run=True, grace_s=5)
    assert json.loads(capsys.readouterr().out)["drift"]["leftovers"] == 1
    reconcile(context, tenant="default", dry_run=False, grace_s=5)
    report = json.loads(capsys.readouterr().out)
    assert (report["settled"], report["drift"]["leftovers"], report["drift"]["open_receipts"]) == (True, 1, 1)
    reconcile(context, tenant=None, dry_run=False, grace_s=5)
    after = json.loads(capsys.readouterr().out)
    assert (after["findings"], after["objects"], after["receipts"]) == ([], 0, 1)
