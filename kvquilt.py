"""The command line: one thin app. What a command does is in `cli/`, imported when the command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.context import Context
from cli.generation_commands import add_generations
from cli.operations import add_operations
from cli.options import check_text, command, setting
from cli.quality import add_quality_commands
from engine.threads import wait_passively
from schemas.errors import InputError, KvquiltError

app = typer.Typer(
    name="kvquilt",
    help="Answers over documents that keep changing: each chunk's KV cache is made once and stitched at query time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ingest = typer.Typer(help="The two streaming pipelines, each in a process of its own.", no_args_is_help=True)
doc = typer.Typer(help="One document, through the HTTP service.", no_args_is_help=True)
kv = typer.Typer(help="KV artifacts in the object store.", no_args_is_help=True)
app.add_typer(ingest, name="ingest")
app.add_typer(doc, name="doc")
app.add_typer(kv, name="kv")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the embedded parts.", show_default=False),
    setting("data_dir"),
]
Host = Annotated[
    str | None, typer.Option("--host", help="Address to listen on.", show_default=False), setting("serve.host")
]
Port = Annotated[
    int | None,
    typer.Option("--port", help="Port to listen on; 0 takes a free one.", show_default=False),
    setting("serve.port"),
]
Url = Annotated[
    str | None, typer.Option("--url", help="The HTTP service to ask.", show_default=False), setting("client.url")
]
Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap", help="The Kafka broker, host:port.", show_default=False),
    setting("kafka.bootstrap"),
]
DocId = Annotated[str, typer.Argument(help="Id of the document.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose document it is.")]


@command(app, long_running=True)
def up(context: Context, data_dir: DataDir = None, host: Host = None, port: Port = None) -> None:
    """Run everything on this machine: broker, both pipelines, HTTP service. Ctrl-C stops it."""
    from cli.up import up

    up(context)


@command(app)
def publish(
    context: Context,
    files: Annotated[list[Path], typer.Argument(help="Files (.md, .txt, .html, .pdf, .jsonl) or folders of them.")],
    root: Annotated[Path, typer.Option("--root", help="Ids are paths relative to this folder.")] = Path(),
    version: Annotated[int | None, typer.Option("--version", min=0, help="Version of all of them.")] = None,
    tenant: Tenant = "default",
    wait: Annotated[bool, typer.Option("--wait", help="Return when text and KV are servable.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that --wait waits at most.")] = 600.0,
    data_dir: DataDir = None,
    bootstrap: Bootstrap = None,
    url: Url = None,
) -> None:
    """Publish files as change events and wait for the broker's answers."""
    from cli.publish import publish

    publish(context, files, root=root, version=version, tenant=tenant, wait_s=timeout if wait else None)


@command(app)
def ask(
    context: Context,
    question: Annotated[str, typer.Argument(help="The question.")],
    mode: Annotated[str, typer.Option("--mode", help="blend, reuse or exact.")] = "reuse",
    k: Annotated[int | None, typer.Option("--k", min=1, max=64, help="How many chunks to answer from.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Length of the answer.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="With blend: of the certified ones, this.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, max=1, help="With blend: share of chunk tokens to repair.")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """Ask a question; the answer streams, then its sources, token counts and timing."""
    from cli.ask import ask

    ask(context, question, mode=mode, k=k, max_tokens=max_tokens, policy=policy, budget=budget)


@command(ingest, "index", long_running=True)
def ingest_index(context: Context, data_dir: DataDir = None, bootstrap: Bootstrap = None) -> None:
    """Documents topic -> chunks -> vectors -> head -> commit record. SIGTERM drains and exits 0."""
    from cli.pipelines import index

    index(context)


@command(ingest, "prefill", long_running=True)
def ingest_prefill(context: Context, data_dir: DataDir = None, bootstrap: Bootstrap = None) -> None:
    """Commits topic -> missing KV artifacts -> object store. SIGTERM drains and exits 0."""
    from cli.pipelines import prefill

    prefill(context)


@command(app, long_running=True)
def backfill(
    context: Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="JSON Lines or Parquet files, documents, folders; behind `--`, options for Beam."),
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="Also a topic, from its start to its end now.")] = None,
    root: Annotated[Path, typer.Option("--root", help="Ids of files are paths relative to this folder.")] = Path(),
    tenant: Annotated[str, typer.Option("--tenant", help="Of files, and of rows that name none.")] = "default",
    prune: Annotated[bool, typer.Option("--prune", help="Delete what the source no longer has.")] = False,
    owns: Annotated[
        list[str] | None,
        typer.Option("--owns", metavar="PREFIX", help="With --prune: ids of its documents begin so; * is all."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --prune: even if most documents would go.")] = False,
    runner: Annotated[str, typer.Option("--runner", help="local, or one of Beam's, such as PrismRunner.")] = "local",
    data_dir: DataDir = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Ingest files, folders or a topic in one batch run of the same transforms."""
    if not prune and (owns or yes or force):
        raise InputError("--owns, --yes and --force say how to prune; add --prune")
    from cli.backfill import Pruning, backfill, parted
    from ingest import Runner

    paths, options = parted(sources or ())
    pruning = Pruning(tuple(owns or ()), yes, force) if prune else None
    runs = Runner(runner, options)
    backfill(context, paths, topic=topic, root=root, tenant=tenant, runner=runs, pruning=pruning)


@command(app, long_running=True)
def serve(
    context: Context,
    data_dir: DataDir = None,
    host: Host = None,
    port: Port = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Run the HTTP service alone, over the Kafka, Qdrant and bucket that the settings name."""
    from cli.serve import serve

    serve(context)


@command(doc)
def status(context: Context, doc_id: DocId, data_dir: DataDir = None, url: Url = None) -> None:
    """Version, state, chunks and KV of a document."""
    from cli.doc import status

    status(context, doc_id)


@command(doc)
def delete(
    context: Context,
    doc_id: Annotated[str | None, typer.Argument(help="Id of the document.", show_default=False)] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="KEY=VALUE", help="All documents with this in their metadata; may be repeated."
        ),
    ] = None,
    tenant_all: Annotated[bool, typer.Option("--tenant-all", help="All documents of the tenant.")] = False,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="TENANT", help="The tenant's name, for --tenant-all.")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """Publish the deletion of a document, of all that match a filter, or of a whole tenant."""
    from cli.doc import delete, delete_many

    if sum((doc_id is not None, bool(filters), tenant_all)) != 1:
        raise InputError("name what to delete: a document's id, --filter KEY=VALUE, or --tenant-all; one of the three")
    if doc_id is not None:
        delete(context, doc_id)
        return
    if tenant_all and confirm is None:
        raise InputError("--tenant-all deletes every document of the tenant; to confirm, add --confirm and its name")
    delete_many(context, filters or (), confirm)


@command(doc)
def receipt(
    context: Context,
    doc_id: DocId,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Of which deletion; the newest.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is complete.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that --wait waits at most.")] = 60.0,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """The receipt of a document's deletion: what was there, what was deleted, what is left, what is missing."""
    from cli.doc import receipt

    receipt(context, doc_id, version, timeout if wait else None)


@command(kv)
def inspect(
    context: Context,
    doc_id: DocId,
    ordinal: Annotated[int | None, typer.Option("--ordinal", min=0, help="Only this chunk.")] = None,
    tenant: Tenant = "default",
    data_dir: DataDir = None,
) -> None:
    """What the KV artifacts of a document say of themselves."""
    from cli.kv import inspect

    inspect(context, doc_id, tenant=tenant, ordinal=ordinal)


@command(app)
def doctor(context: Context, data_dir: DataDir = None, bootstrap: Bootstrap = None, url: Url = None) -> None:
    """Check versions, models, broker, index, object store and service; says what to do about what fails."""
    from cli.doctor import doctor

    doctor(context)


add_quality_commands(app)
add_operations(app)
add_generations(app)


def main() -> None:
    """Run a command; an error of ours is one sentence on stderr and exit status 1."""
    wait_passively()
    try:
        check_text(sys.argv[1:])
        app()
    except KvquiltError as error:
        print(f"kvquilt: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
