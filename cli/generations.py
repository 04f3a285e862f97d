"""`kvquilt reindex`, `promote`, `rollback`, `gc` and `generations`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.context import Context
from cli.embedded import embedded
from cli.running import with_broker
from cli.stop import stop_on_signals
from schemas.errors import KvquiltError
from schemas.generations import Generations, KnownGeneration
from schemas.settings import Settings
from stores.generations import GenerationStore
from stores.reclaim import Reclaimed, reclaim


def reindex(context: Context, paths: Sequence[Path], *, root: Path, tenant: str, follow: bool) -> None:
    """Build the generation of the settings beside the live one, with bars.

    Raises:
        KvquiltError: it was stopped before it was built; the next run goes on there.
    """
    from cli.pipelines import say_start
    from ingest import BackfillProgress, Reindexed, ReindexProgress, run_reindex
    from ingest.sources import survey

    with stop_on_signals() as stop, ExitStack() as stack:
        if context.settings.qdrant.url:
            settings = with_broker(context.settings)
        else:  # the local index is one process's: ours, for as long as this takes
            settings = stack.enter_context(embedded(context.settings)).settings
        say_start(context, settings, "FnApiRunner, in this process")
        source = survey(paths, root=root, tenant=tenant, kafka=settings.kafka) if paths else None
        progress = stack.enter_context(context.progress())
        rows = progress.add_task("source", total=None, visible=source is not None)
        text, kv = progress.add_task("text", total=None), progress.add_task("KV", total=None)

        def report(now: ReindexProgress) -> None:
            for task, left, total in (
                (text, now.index_left, now.index_total),
                (kv, now.prefill_left, now.prefill_total),
            ):
                if left is not None and total is not None:
                    progress.update(task, completed=total - left, total=total)

        def backfilled(now: BackfillProgress) -> None:
            progress.update(rows, completed=now.indexed, total=now.total)

        def built(done: Reindexed) -> None:
            context.say(f"generation {done.generation} is built; lacking: {done.gap}")
            if follow:
                context.say("feeding it until Ctrl-C; `kvquilt promote` makes it live")

        done = run_reindex(
            settings, stop, source=source, follow=follow, progress=report, backfilled=backfilled, on_built=built
        )
    if not done.built:
        raise KvquiltError(f"stopped before generation {done.generation} was built; run it again: it goes on there")
    gap = "" if done.gap is None else str(done.gap)
    context.result(
        {"generation": done.generation, "built": True, "carried": done.carried, "gap": gap},
        f"generation {done.generation} is built beside the live one: {gap}. Keep feeding it with its settings "
        f"(`kvquilt ingest index` and `ingest prefill`; `kvquilt up` does), then `kvquilt promote {done.generation}`",
    )


def promote(context: Context, name: str | None, *, force: bool, wait_s: float) -> None:
    """Make a generation live, if it lacks nothing of the live one, or by force."""
    from ingest.switching import candidate

    with _at_rest(context.settings) as (settings, store):
        record = store.read()
        _switch(context, settings, store, record.named(name) if name else candidate(record), force, wait_s)


def rollback(context: Context, *, force: bool, wait_s: float) -> None:
    """Make live what was live before."""
    with _at_rest(context.settings) as (settings, store):
        _switch(context, settings, store, store.read().to_roll_back_to(), force, wait_s)


def _switch(
    context: Context, settings: Settings, store: GenerationStore, target: KnownGeneration, force: bool, wait_s: float
) -> None:
    from ingest.switching import promote

    done = promote(settings, store, target, force=force, wait_s=wait_s)
    check_s, missing = context.settings.generations.check_s, str(done.gap)
    context.result(
        {"live": done.live, "before": done.before, "complete": not done.gap, "gap": missing},
        f"generation {done.live} is live, {done.before} stands by: {missing}. Serving replicas follow within "
        f"{check_s:g} s where their model fits; `kvquilt rollback` flips back",
    )


def gc(context: Context, *, grace_s: float | None, dry_run: bool) -> None:
    """Reclaim what is not live, not in use and past its grace."""
    from stores import open_index

    settings = context.settings
    grace_s = settings.generations.grace_s if grace_s is None else grace_s
    with _at_rest(settings) as (settings, store):
        done = reclaim(
            store,
            lambda entry: open_index(
                settings.qdrant, settings.qdrant_location, entry.name, entry.generation.embedding_dim
            ),
            grace_s=grace_s,
            dry_run=dry_run,
        )
    lines = [f"{one.generation}  {_fate(one, dry_run)}" for one in done]
    plain = {"dry_run": dry_run, "generations": [asdict(one) for one in done]}
    context.result(plain, "\n".join(lines) or "nothing to reclaim: there is no generation but the live one")


def generations(context: Context) -> None:
    """Print the record and who uses what."""
    from ingest.switching import open_generations

    store = open_generations(context.settings)
    record = store.read()
    rows = list(_rows(store, record))
    lines = [f"{row['generation']}  {row['state']:<10} since {_time(row['since_ms'])}  {row['what']}" for row in rows]
    for at, row in reversed(list(enumerate(rows))):
        lines[at + 1 : at + 1] = [f"    used by {holder}" for holder in row["used_by"]]
    live = record.live.name if record.live else None
    plain = {"live": live, "previous": record.previous, "sequence": record.sequence, "generations": rows}
    context.result(plain, "\n".join(lines) or "no generation yet; the first that is used is live")


def _fate(one: Reclaimed, dry_run: bool) -> str:
    if one.kept:
        return f"kept: {one.kept}"
    if dry_run:
        return "would be reclaimed"
    return f"reclaimed: {one.collections} collections, {one.objects} objects, {one.parts} open parts of receipts"


def _done(left: int | None, total: int | None) -> int:
    return 0 if left is None or total is None else total - left


def _rows(store: GenerationStore, record: Generations) -> Iterator[dict[str, Any]]:
    for one in record.known:
        made = one.generation
        yield {
            "generation": one.name,
            "state": str(one.state),
            "since_ms": one.since_ms,
            "group": one.group,
            "previous": one.name == record.previous,
            "what": f"{made.fingerprint.model} {made.fingerprint.dtype}, {made.embedder}, chunks of "
            f"{made.chunk_max_tokens}, {made.prefill_variant}",
            "used_by": [f"{lease.role} of {lease.holder}" for lease in store.leases.held(one.name)],
            "settings": one.settings,
        }


@contextmanager
def _at_rest(settings: Settings) -> Iterator[tuple[Settings, GenerationStore]]:
    """Settings with a broker and the record; Qdrant's local mode is ours, since one process opens it."""
    from ingest.switching import open_generations

    with ExitStack() as stack:
        settings = with_broker(settings) if settings.qdrant.url else stack.enter_context(embedded(settings)).settings
        yield settings, open_generations(settings)


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(" ", "seconds")
