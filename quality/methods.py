"""The methods of a table, and how a command line names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from engine.policies import POLICIES, create_policy
from engine.variants import SHARED_PREFIX, Variant, variant_named
from quality.choices import NEAREST, Neighbours, neighbours_named
from schemas.errors import InputError
from schemas.ids import writable

FULL, NO_CONTEXT = "full", "no_context"
BUDGETS = (0.05, 0.10, 0.15, 0.20)
_EPIC_HEADS = (16, 32)
_Kind = tuple[Variant, Neighbours]


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        policy: a selection policy, or `full` attention, or `no_context`; those two have no variant and no budget.
        options: of the policy, as (name, value) pairs.
        neighbours: which chunks a fused variant puts in front.
    """

    policy: str
    budget: float = 0.0
    variant: Variant = SHARED_PREFIX
    options: tuple[tuple[str, Any], ...] = ()
    neighbours: Neighbours = NEAREST

    @property
    def label(self) -> str:
        """How tables call it."""
        if self.policy in (FULL, NO_CONTEXT):
            return self.policy.replace("_", " ")
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.policy}{options}"

    @property
    def prefill(self) -> str:
        """The variant as tables call it, with the choice of neighbours where that is not the product's."""
        if self.policy in (FULL, NO_CONTEXT):
            return ""
        return self.variant.name if self.neighbours == NEAREST else f"{self.variant.name}:{self.neighbours.label}"

    def check(self) -> None:
        """Raise `InputError` where there is no such policy, or it does not take the options or the budget."""
        if not 0.0 <= self.budget <= 1.0:
            raise InputError(f"the budget is {self.budget}; expected the share of chunk tokens to repair, 0 to 1")
        if self.policy not in (FULL, NO_CONTEXT):
            create_policy(self.policy, **dict(self.options))


BASELINES = (Method(FULL), Method(NO_CONTEXT))


def methods_of(
    policies: Sequence[str], budgets: Sequence[float], variants: Sequence[str]
) -> tuple[list[Method], list[Method]]:
    """The methods to run, and those of them that were asked for.

    `none` is run for every variant, asked for or not. Without any policy all are asked for, EPIC's 16 and 32 too.

    Args:
        policies: names, with options where wanted: `closure:floor=32,run_bonus=1`.
        budgets: shares of chunk tokens.
        variants: names, with a choice of neighbours where wanted: `fused:random=5`; without any, `shared_prefix`.

    Raises:
        InputError: a policy, an option, a budget or a variant does not exist.
    """
    kinds = [_kind(name) for name in dict.fromkeys(variants)] or [(SHARED_PREFIX, NEAREST)]
    spent = list(dict.fromkeys(budgets)) or list(BUDGETS)
    named = [_parse(policy) for policy in policies] or [(name, ()) for name in POLICIES if name not in (FULL, "none")]
    run: list[Method] = []
    asked: list[Method] = []
    for kind in kinds:
        run.append(_method("none", 0.0, kind))
        if not policies:
            asked.append(run[-1])
        for name, options in named:
            for method in _spending(name, options, spent, kind):
                method.check()
                asked.append(method)
                if method not in run and name not in (FULL, NO_CONTEXT):
                    run.append(method)
        if not policies:
            heads = [_method("epic", 1.0, kind, (("n_head", n),)) for n in _EPIC_HEADS]
            run += heads
            asked += heads
    return run, list(dict.fromkeys(asked))


def _kind(text: str) -> _Kind:
    """`VARIANT`, or `VARIANT:CHOICE` of neighbours."""
    name, separator, choice = text.partition(":")
    variant = variant_named(name)
    if separator and not variant.fused:
        raise InputError(f"variant {text!r}: only the fused ones have neighbours ({name} has none)")
    return variant, neighbours_named(choice) if separator else NEAREST


def _method(name: str, budget: float, kind: _Kind, options: tuple[tuple[str, Any], ...] = ()) -> Method:
    return Method(name, budget, kind[0], options, kind[1])


def _spending(name: str, options: tuple[tuple[str, Any], ...], budgets: Sequence[float], kind: _Kind) -> list[Method]:
    if name in (FULL, NO_CONTEXT):
        return [Method(name)]
    if name == "none":
        return [_method(name, 0.0, kind)]
    return [_method(name, budget, kind, options) for budget in budgets]


def _parse(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """`name` or `name:option=value,…`; values are YAML, lists in brackets."""
    name, _, rest = text.partition(":")
    options = []
    for piece in _split(rest) if rest else []:
        option, separator, value = piece.partition("=")
        if not separator or not option.strip():
            raise InputError(f"policy {text!r}: options are name=value, such as closure:floor=32 (got {piece!r})")
        try:
            parsed = writable(yaml.safe_load(value))  # it goes into a certificate
        except yaml.YAMLError as error:
            raise InputError(f"policy {text!r}: the value of {option} is not YAML: {error}") from error
        except ValueError as error:
            raise InputError(f"policy {text!r}: the value of {option} {error}") from error
        options.append((option.strip(), tuple(parsed) if isinstance(parsed, list) else parsed))
    return name, tuple(options)


def _split(text: str) -> list[str]:
    """At commas that are not in brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces
