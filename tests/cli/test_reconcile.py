"""`kvquilt reconcile`: what its table says."""

from cli.reconcile import SHOWN, _lines
from ingest.reconcile import Action, Finding, Kind, Report


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
