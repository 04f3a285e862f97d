"""The options that every command has, and how a command gets them: as one `Context`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.context import Format
from schemas.errors import InputError

_COMMON: dict[str, tuple[Any, Any]] = {  # name -> (annotation, default)
    "config": (
        Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", show_default=False)],
        None,
    ),
    "assignments": (
        Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as model.name=…; may be repeated."),
        ],
        None,
    ),
    "format": (Annotated[Format, typer.Option("--format", help="How to write the result.")], Format.TERMINAL),
    "output": (
        Annotated[Path | None, typer.Option("--output", help="Write the result to this file.", show_default=False)],
        None,
    ),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")], False),
}


def command(
    app: typer.Typer, name: str | None = None, *, long_running: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first parameter is a `cli.context.Context`, built from the common options.

    With `long_running`, logging is set up before the command's own imports, some of which log.

    A parameter may declare the setting that it is a short form of: `SETTING = "serve.port"` as second metadata of
    its `Annotated` type (see `setting`); it then has the precedence of a flag.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        shown = [parameter for parameter in own if parameter.name != "context"]
        shortcuts = {parameter.name: key for parameter in shown if (key := _setting_of(parameter.annotation))}

        @functools.wraps(function)
        def run(**values: Any) -> None:
            from cli.flags import make_context
            from schemas.foreign import refuse_foreign_kernels

            refuse_foreign_kernels()
            _check_numbers(values)
            common = {name: values.pop(name) for name in _COMMON}
            flags = {key: value for name, key in shortcuts.items() if (value := values.pop(name)) is not None}
            context = make_context(flags=flags, **common)
            if long_running:
                from cli.logs import set_up_logging

                set_up_logging(context.quiet)
            function(context, **values)

        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in _COMMON.items()
        ]
        shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
        run.__signature__ = inspect.Signature([*shown, *extra])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shown, *extra]}
        del run.__wrapped__
        app.command(name)(run)
        return run

    return register


def check_text(arguments: Iterable[str]) -> None:
    """Raise `InputError` where an argument is not UTF-8: it reaches Python with half surrogate pairs."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"argument {argument!r} is not UTF-8 at character {error.start}") from error


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):  # NaN is under every bound and over it
                raise InputError(f"{name}: expected a finite number (got {number})")


class setting(str):  # noqa: N801 - reads as a word in an annotation
    """Marks an option as the short form of a setting: `Annotated[int | None, typer.Option(), setting("a.b")]`."""

    __slots__ = ()


def _setting_of(annotation: Any) -> str | None:
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, setting):
            return str(mark)
    return None
