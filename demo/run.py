"""The demo: the main job of kvquilt on its embedded parts. Every figure that it prints is measured in this run.

python -m demo.run            stays up at the end, until Ctrl-C
python -m demo.run --exit     ends instead
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.context import Context
from cli.documents import files_in, read_documents
from cli.publish import publish_documents, wait
from cli.service import Service
from demo.child import Up
from demo.report import Report
from demo.script import Script, load_script
from demo.steps import Asker, ask_facts, change, delete, race
from schemas.errors import InputError, KvquiltError
from schemas.settings import Settings, load_settings
from stores import Publisher

HERE = Path(__file__).parent
WAIT_S = 600.0


def main(
    exit_: Annotated[bool, typer.Option("--exit", help="End after the table instead of staying up.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Keep the data here instead of in a temporary folder.")] = None,
) -> None:
    """Publish a handbook, ask, change, delete, and time a long question with and without stitched KV."""
    console = Console(highlight=False)
    folder = data_dir or Path(tempfile.mkdtemp(prefix="kvquilt-demo-"))
    try:
        with Up(folder, "--set", "serve.prefix_cache_bytes=0") as up:  # a question asked again is to be measured, too
            report = run(console, up, load_script(HERE / "questions.yaml"))
            report.print(console)
            if report.faults:
                raise KvquiltError("; ".join(report.faults))
            if not exit_:
                console.print("\nAsk it yourself on that page. Ctrl-C ends the demo.")
                _until_interrupted(up)
    except KeyboardInterrupt:
        console.print("\nstopped")
    except KvquiltError as error:
        console.print(f"[red]demo:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        if data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def run(console: Console, up: Up, script: Script) -> Report:
    """The steps, in order."""
    start_s = time.monotonic()
    console.rule("kvquilt up")
    console.print("One process with the HTTP service and both pipelines; beside it a broker.")
    with console.status("loading the two models; the first time ever they are converted first"):
        running = up.wait_ready()
    report = Report(url=running.url)
    report.add("service ready", f"{time.monotonic() - start_s:.1f} s")
    settings = load_settings(
        {"data_dir": str(up.folder), "client": {"url": running.url}, "kafka": {"bootstrap": running.bootstrap}}
    )
    with Service.of(settings) as service:
        asker = Asker(console, service, script.k)
        _publish(console, settings, report)
        console.rule("five questions")
        ask_facts(asker, script.questions, report)
        change(console, asker, script.change, HERE / "handbook", report)
        delete(console, asker, script.delete, report)
        race(console, service, script.long.question, report)
    peak = up.peak_bytes()
    if peak is not None:
        report.add("most memory, service and broker", f"{peak / 2**30:.1f} GiB")
    report.add("the whole demo", f"{time.monotonic() - start_s:.0f} s")
    return report


def _publish(console: Console, settings: Settings, report: Report) -> None:
    console.rule("publish the handbook")
    handbook = HERE / "handbook"
    files = files_in([handbook])
    documents = []
    for file in files:
        for outcome in read_documents(file, root=handbook):
            if isinstance(outcome, InputError):
                raise outcome
            documents.append(outcome)
    start_s = time.monotonic()
    context = Context(settings)
    with context.progress() as progress, Publisher(settings.kafka) as publisher:
        task = progress.add_task("published", total=len(documents))
        sent = publish_documents(publisher, settings.kafka, iter(documents), lambda: progress.advance(task))
    reached = wait(context, settings.kafka, sent, WAIT_S)
    if reached.refused:
        raise KvquiltError(f"the ingest refused {', '.join(reached.refused)}")
    report.add(f"{len(documents)} pages, text and KV servable", f"{time.monotonic() - start_s:.1f} s")


def _until_interrupted(up: Up) -> None:
    while up.alive:
        time.sleep(0.5)
    raise KvquiltError(f"`kvquilt up` has ended:\n{up.log_end()}")


if __name__ == "__main__":
    typer.run(main)
