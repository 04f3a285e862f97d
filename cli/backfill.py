"""`kvquilt backfill`: a source in one batch run, with bars, and what became of it; with `--prune`, after a question."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from cli.context import Context
from cli.embedded import embedded
from cli.pipelines import say_start
from cli.running import with_broker
from ingest import BackfillProgress, Prune, Runner, plan_prune, run_backfill
from ingest.sources import LeftOut, Source, survey
from schemas.errors import InputError
from schemas.settings import Settings
from stores import ensure_topics

_NAMED = 20  # paths that are named for each reason


@dataclass(frozen=True)
class Pruning:
    """How to prune.

    Attributes:
        owns: what the ids of the source's documents begin with; empty: what the source tells.
        yes: do not ask.
        force: even if the source is empty, or most of the documents would go.
    """

    owns: tuple[str, ...]
    yes: bool
    force: bool


def parted(words: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Sources, and from the first word on that begins with dashes, Beam's options: what came behind `--`."""
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return [Path(word) for word in words[:first]], tuple(words[first:])


def backfill(
    context: Context,
    paths: Sequence[Path],
    *,
    topic: str | None,
    root: Path,
    tenant: str,
    runner: Runner,
    pruning: Pruning | None,
) -> None:
    """Ingest files, folders and a topic in one batch run, and print what became of the rows.

    Raises:
        InputError: some of it was not taken; the rest was.
    """
    if not paths and topic is None:
        raise InputError("nothing to read: name files, folders, or a topic with --topic")
    if topic is not None and tenant != "default":
        raise InputError("--tenant is of files; the events of a topic name their tenants themselves")
    with ExitStack() as stack:
        settings = stack.enter_context(_parts(context.settings))
        runner.check(settings)
        say_start(context, settings, str(runner))
        ensure_topics(settings.kafka)
        source = survey(paths, root=root, tenant=tenant, topic=topic, kafka=settings.kafka)
        _say_left_out(context, source.left_out)
        prune = _agreed(context, plan_prune(settings, source, tenant, pruning.owns), pruning) if pruning else None
        done = _run(context, settings, source, runner, prune)
    _tell(context, settings, source, done)


@contextmanager
def _parts(settings: Settings) -> Iterator[Settings]:
    if settings.qdrant.url:
        yield with_broker(settings)
    else:  # the local index is one process's: ours, for as long as this takes
        with embedded(settings) as parts:
            yield parts.settings


def _run(context: Context, settings: Settings, source: Source, runner: Runner, prune: Prune | None) -> BackfillProgress:
    with context.progress(rate=True) as progress:
        text, rows = progress.add_task("text", total=None), progress.add_task("KV", total=None)

        def report(now: BackfillProgress) -> None:
            progress.update(text, completed=now.indexed, total=now.total)
            if now.prefilled:  # only now it is known how many there are
                progress.update(rows, completed=now.prefilled, total=now.to_prefill)

        return run_backfill(settings, source, report, runner=runner, prune=prune)


def _agreed(context: Context, prune: Prune, pruning: Pruning) -> Prune:
    """The same, once nothing speaks against it."""
    count = len(prune.heads)
    newer = f"; {prune.n_newer} more changed since it was written, and stay" if prune.n_newer else ""
    context.say(f"the source no longer has {count} of the {prune.n_owned} documents that it owns{newer}")
    for head in prune.heads[:_NAMED]:
        context.say(f"  to be deleted: {head.doc_id}")
    if count > _NAMED:
        context.say(f"  and {count - _NAMED} more")
    if prune.takes_most and not pruning.force:
        raise InputError(
            f"--prune would delete {count} of {prune.n_owned} documents, more than half; nothing was done. If the "
            "source is whole, add --force"
        )
    if count and not pruning.yes:
        if not sys.stdin.isatty():
            raise InputError(f"--prune would delete {count} documents, and there is nobody to ask; add --yes")
        if not typer.confirm(f"Delete {count} documents when everything else is done?", err=True):
            raise InputError("nothing was done")
    return prune


def _say_left_out(context: Context, left_out: Sequence[LeftOut]) -> None:
    for why, paths in _by_reason(left_out).items():
        context.say(f"left out, {why}: {len(paths)}")
        for path in paths[:_NAMED]:
            context.say(f"  {path}")
        if len(paths) > _NAMED:
            context.say(f"  and {len(paths) - _NAMED} more")


def _by_reason(left_out: Sequence[LeftOut]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for one in left_out:
        found[one.why.value].append(one.path)
    return dict(found)


def _tell(context: Context, settings: Settings, source: Source, done: BackfillProgress) -> None:
    dead_letters = settings.kafka.dead_letter_topic
    told: dict[str, Any] = asdict(done) | {"left_out": _by_reason(source.left_out)}
    context.result(
        told,
        f"{done.total} rows: {done.committed} committed, {done.repeated} already there, {done.superseded} older than "
        f"what is there, {done.dead} dead letters in {dead_letters}; KV of {done.prefilled} documents"
        + (f"; {done.pruned} documents deleted" if done.pruned else "")
        + (f"; {len(source.left_out)} files left out" if source.left_out else ""),
    )
    faults = [one for one in source.left_out if one.why.is_fault]
    if faults:
        raise InputError(f"{len(faults)} files were not taken, the first: {faults[0].path} ({faults[0].why.value})")
    if done.dead:
        raise InputError(f"{done.dead} rows were not taken; {dead_letters} says why")
