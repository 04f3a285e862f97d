"""The pages say what the program does: settings, commands, and what a reader is told to type."""

import json
import re
from pathlib import Path

import pytest
import typer.main
from click import Group

import kvquilt
from schemas.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"])


def fields(model, prefix=""):
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def commands(group=None, path=("kvquilt",)):
    group = group or typer.main.get_command(kvquilt.app)
    for name, command in group.commands.items():
        if isinstance(command, Group) or hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def shown(default):
    if default in ("", None):
        return ""
    text = default if isinstance(default, str) else str(default) if isinstance(default, Path) else json.dumps(default)
    return text.replace("\n", "\\n")


def test_every_setting_is_documented_with_its_default_and_nothing_else_is():
    rows = re.findall(r"^\| `([a-z_.]+)` \|(?: `([^|]*)`)? \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    documented = dict(rows)
    real = {name: shown(field.get_default(call_default_factory=True)) for name, field in fields(Settings)}
    assert list(documented) == list(real), "docs/settings.md lists the settings in the order of the class"
    for name, default in real.items():
        says = documented[name]
        same = default.startswith(says.removesuffix("…").rstrip()) if says.endswith("…") else says == default
        assert same, f"docs/settings.md says {name} is {says!r}; it is {default!r}"


def test_every_command_is_documented_and_every_documented_command_exists():
    documented = re.findall(
        r"^\| `(kvquilt [a-z ]+?)(?: [A-Z…]+)?` \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE
    )
    assert sorted(documented) == sorted(name for name, _ in commands())


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_and_every_option_has_a_help_text(name):
    command = dict(commands())[name]
    assert command.help, f"{name} has no help"
    silent = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert not silent, f"{name}: no help for {silent}"


def typed(page):
    """The command lines in the code blocks of a page."""
    for block in re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield line.strip().removeprefix("$ ").split("#")[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_to_type_exists(page):
    """Bug: a README told newcomers to run a command that had been renamed."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = dict(commands())
    for line in typed(page):
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, f"{page.name}: no target {words[1]}"
        if words[:1] == ["kvquilt"]:
            name = next((name for name in known if line.startswith(name)), None)
            assert name, f"{page.name}: no command `{line}`"
            options = {option for each in known[name].params for option in (*each.opts, *each.secondary_opts)}
            used = {word.split("=")[0] for word in words if word.startswith("-")}
            assert used <= options, f"{page.name}: `{line}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = set(re.findall(r"\]\(([^)#:]+)\)", text))
    for name in named:
        assert (page.parent / name).exists(), f"{page.name} links to {name}"
    for name in re.findall(r"\b((?:docs|tests|bench|schemas|demo|deploy)/[\w./-]+\.(?:md|py|ya?ml))", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
