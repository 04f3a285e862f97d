"""The commands about generations, declared; what they do is in `cli/generations.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.context import Context
from cli.operations import Bootstrap, DataDir
from cli.options import command

Force = Annotated[bool, typer.Option("--force", help="Even if it is not caught up; says what is missing.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds that what is on its way is waited for.")]


def add_generations(app: typer.Typer) -> None:
    """Put the commands below the program."""

    @command(app, long_running=True)
    def reindex(
        context: Context,
        source: Annotated[
            list[Path] | None,
            typer.Option("--source", help="Files or folders to read before the topics; may be repeated."),
        ] = None,
        root: Annotated[Path, typer.Option("--root", help="Ids of files are paths relative to this folder.")] = Path(),
        tenant: Annotated[str, typer.Option("--tenant", help="Of files, and of rows that name none.")] = "default",
        follow: Annotated[bool, typer.Option("--follow", help="Go on feeding it when it is built.")] = False,
        data_dir: DataDir = None,
        bootstrap: Bootstrap = None,
    ) -> None:
        """Build the generation of these settings beside the live one, which goes on being fed and served."""
        from cli.generations import reindex

        reindex(context, source or (), root=root, tenant=tenant, follow=follow)

    @command(app)
    def promote(
        context: Context,
        generation: Annotated[
            str | None, typer.Argument(help="Its name, or how it begins; the one that was built.", show_default=False)
        ] = None,
        force: Force = False,
        wait: Wait = 30.0,
        data_dir: DataDir = None,
    ) -> None:
        """Make a generation live, vectors and KV in one step; refuses while it lacks anything of the live one."""
        from cli.generations import promote

        promote(context, generation, force=force, wait_s=wait)

    @command(app)
    def rollback(context: Context, force: Force = False, wait: Wait = 30.0, data_dir: DataDir = None) -> None:
        """Make live what was live before, in one step."""
        from cli.generations import rollback

        rollback(context, force=force, wait_s=wait)

    @command(app)
    def gc(
        context: Context,
        grace: Annotated[
            float | None,
            typer.Option("--grace", min=0, help="Seconds; generations.grace_s says otherwise.", show_default=False),
        ] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be reclaimed.")] = False,
        data_dir: DataDir = None,
    ) -> None:
        """Reclaim generations that are not live, not in use and past their grace."""
        from cli.generations import gc

        gc(context, grace_s=grace, dry_run=dry_run)

    @command(app)
    def generations(context: Context, data_dir: DataDir = None) -> None:
        """List the generations: which is live, since when, who uses which."""
        from cli.generations import generations

        generations(context)
