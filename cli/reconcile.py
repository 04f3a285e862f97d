"""`kvquilt reconcile`: heads, points, objects and receipts compared; drift repaired, and shown as a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from cli.context import Context
from cli.embedded import embedded
from cli.running import with_broker
from cli.start import say_identity
from engine import resolve_generation
from ingest import Report, run_reconcile

SHOWN = 20  # findings on a terminal; JSON has all


def reconcile(context: Context, *, tenant: str | None, dry_run: bool, grace_s: float) -> None:
    """Look, wait for the pipelines where there is anything, repair, report."""
    with ExitStack() as stack:
        if context.settings.qdrant.url:
            settings = with_broker(context.settings)
        else:  # the local index is one process's: ours, for as long as this takes
            settings = stack.enter_context(embedded(context.settings)).settings
        say_identity(context, resolve_generation(settings).generation)
        report = run_reconcile(settings, tenant=tenant, dry_run=dry_run, grace_s=grace_s)
    context.result({"dry_run": dry_run, **report.plain()}, "\n".join(_lines(report, dry_run)))


def _lines(report: Report, dry_run: bool) -> Iterator[str]:
    yield (
        f"{report.documents} documents, {report.points} points, {report.objects} KV artifacts, "
        f"{report.receipts} complete receipts"
    )
    if not report.findings:
        yield "everything agrees"
        return
    if not report.settled:
        yield "the pipelines are behind: what may be on its way was left alone; run it again later"
    yield f"{'drift':<18}{'count':>8}  {'found in' if dry_run else 'repaired in'}"
    for kind, count in report.counts().items():
        if count:
            documents = sum(finding.kind is kind for finding in report.findings)
            yield f"{kind:<18}{count:>8}  {documents} documents"
    for finding in report.findings[:SHOWN]:
        detail = f" ({finding.detail})" if finding.detail else ""
        yield f"  {finding.document}: {finding.kind} {finding.n}, {finding.action}{detail}"
    if len(report.findings) > SHOWN:
        yield f"  and {len(report.findings) - SHOWN} more; --format json has them all"
