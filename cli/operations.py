"""The commands that look after the data, declared; what they do is in `cli/dlq.py` and `cli/reconcile.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.context import Context
from cli.options import command, setting
from schemas.errors import InputError

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the embedded parts.", show_default=False),
    setting("data_dir"),
]
Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap", help="The Kafka broker, host:port.", show_default=False),
    setting("kafka.bootstrap"),
]
Stage = Annotated[str | None, typer.Option("--stage", help="Only of this step: parse, plan, embed, prefill.")]
Error = Annotated[str | None, typer.Option("--error", help="Only of this class of error.")]
Key = Annotated[str | None, typer.Option("--key", help="Only with this key: the document's id.")]
Again = Annotated[bool, typer.Option("--again", help="Also those that were sent again or dismissed.")]


def add_operations(app: typer.Typer) -> None:
    """Put the commands below the program."""
    dlq = typer.Typer(help="Dead letters: events that could not be processed.", no_args_is_help=True)
    app.add_typer(dlq, name="dlq")

    @command(dlq)
    def ls(
        context: Context,
        stage: Stage = None,
        error: Error = None,
        key: Key = None,
        again: Again = False,
        limit: Annotated[int, typer.Option("--limit", min=1, help="The newest of them.")] = 50,
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """List the dead letters that are still to be dealt with."""
        from cli.dlq import Which, ls

        ls(context, Which(stage=stage, error=error, key=key, again=again), limit)

    @command(dlq)
    def show(
        context: Context,
        letter: Annotated[str, typer.Argument(help="partition:offset, as `dlq ls` shows it.")],
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """One dead letter with its headers and its value."""
        from cli.dlq import show

        show(context, letter)

    @command(dlq)
    def replay(
        context: Context,
        letters: Annotated[
            list[str] | None, typer.Argument(help="partition:offset of each; without any, all that the filters fit.")
        ] = None,
        stage: Stage = None,
        error: Error = None,
        key: Key = None,
        again: Again = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """Send dead letters again, as they were and in their place in the order of changes."""
        from cli.dlq import Which, send_again
        from stores.dead_letters import LetterId

        ids = tuple(map(LetterId.of, letters or ()))
        send_again(context, Which(ids, stage, error, key, again), dry_run=dry_run)

    @command(dlq)
    def dismiss(
        context: Context,
        letters: Annotated[list[str] | None, typer.Argument(help="partition:offset of each.")] = None,
        stage: Stage = None,
        error: Error = None,
        key: Key = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """Note that dead letters are not wanted any more: their document was published anew, or is gone."""
        from cli.dlq import Which, set_aside
        from stores.dead_letters import LetterId

        if not (letters or stage or error or key):
            raise InputError("name the letters to dismiss, or choose them by --stage, --error or --key")
        set_aside(context, Which(tuple(map(LetterId.of, letters or ())), stage, error, key), dry_run=dry_run)

    @command(app, long_running=True)
    def reconcile(
        context: Context,
        tenant: Annotated[str | None, typer.Option("--tenant", help="Only this one's documents.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what does not agree.")] = False,
        grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds that pipelines are waited for.")] = 30.0,
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """Compare heads, points, KV artifacts and receipts; repair what does not agree, and report it."""
        from cli.reconcile import reconcile

        reconcile(context, tenant=tenant, dry_run=dry_run, grace_s=grace)
