"""The commands that measure quality, declared; what they do is in `cli/evaluate.py` and `cli/verify.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.context import Context
from cli.options import command, setting

Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="A selection policy, with options where wanted: closure:floor=32. May be repeated."),
]
Budgets = Annotated[
    list[float] | None,
    typer.Option("--budget", help="Share of chunk tokens to repair, 0 to 1. May be repeated."),
]
Variants = Annotated[list[str] | None, typer.Option("--variant", help="A chunk prefill variant. May be repeated.")]
EvalVariants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="A chunk prefill variant; fused ones with a choice of neighbours where wanted: fused:random=5. "
        "May be repeated.",
    ),
]


def add_quality_commands(app: typer.Typer) -> None:
    """Register `eval` and `verify`."""

    @command(app, "eval")
    def evaluate(
        context: Context,
        sets: Annotated[
            list[str], typer.Argument(metavar="SET…", help="musique, hotpotqa, rgb, turborag, ruler, or .jsonl files.")
        ],
        policies: Policies = None,
        budgets: Budgets = None,
        variants: EvalVariants = None,
        limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first questions.")] = None,
        data: Annotated[
            Path | None, typer.Option("--data", help="Folder of the question sets."), setting("quality.data_dir")
        ] = None,
        chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks of a prompt, at most.")] = 6,
        chunk_tokens: Annotated[
            int, typer.Option("--chunk-tokens", min=0, help="Cut the passages anew; 0 leaves them as they are.")
        ] = 0,
        order: Annotated[str, typer.Option("--order", help="given, reversed or shuffled.")] = "given",
        duplicates: Annotated[int, typer.Option("--duplicates", min=0, help="So many chunks come twice.")] = 0,
        noise: Annotated[float, typer.Option("--noise", help="Share of negative passages (rgb), 0 to 1.")] = 0.4,
        answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=12, help="Length of an answer.")] = 32,
        other: Annotated[str, typer.Option("--other", help="The set that neighbours by `other` come from.")] = "ruler",
        results: Annotated[
            Path | None, typer.Option("--results", help="Keep each result in this file, and use what is there.")
        ] = None,
        markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
        plot: Annotated[Path | None, typer.Option("--plot", help="Write the plot to this .svg file.")] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="One line of JSON for each method that was asked for.")
        ] = False,
    ) -> None:
        """Compare methods with full attention: KL, F1, retention and time to the first token."""
        from cli.evaluate import evaluate_sets
        from quality import Form

        evaluate_sets(
            context,
            sets,
            policies=policies or (),
            budgets=budgets or (),
            variants=variants or (),
            limit=limit,
            form=Form(chunks, chunk_tokens, order, duplicates),
            noise=noise,
            answer_tokens=answer_tokens,
            other=other,
            results=results,
            markdown_file=markdown,
            plot=plot,
            as_json=as_json,
        )

    @command(app, "verify")
    def verify(
        context: Context,
        model: Annotated[
            str | None,
            typer.Argument(metavar="[MODEL]", help="As model.name in the settings; the one that is set there without."),
            setting("model.name"),
        ] = None,
        policies: Policies = None,
        budgets: Budgets = None,
        variants: Variants = None,
        limit: Annotated[int, typer.Option("--limit", min=1, max=60, help="Number of questions.")] = 12,
        file: Annotated[Path | None, typer.Option("--file", help="Write the certificate to this file too.")] = None,
        store: Annotated[
            bool, typer.Option("--store/--no-store", help="Keep it in the object store, with its generation.")
        ] = True,
        data_dir: Annotated[
            Path | None, typer.Option("--data-dir", help="Folder of the embedded parts."), setting("data_dir")
        ] = None,
    ) -> None:
        """Certify a model: that its rows can be moved and repaired, and which policy and budget come close enough."""
        from cli.verify import verify_model

        verify_model(
            context,
            policies=policies or (),
            budgets=budgets or (),
            variants=variants or (),
            limit=limit,
            file=file,
            store=store,
        )
