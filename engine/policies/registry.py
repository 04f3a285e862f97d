"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.policies.cacheblend import CacheBlendPolicy
from engine.policies.closure import ClosurePolicy
from engine.policies.composite import CompositePolicy
from engine.policies.epic import EpicPolicy
from engine.policies.full import FullPolicy
from engine.policies.fusionrag import FusionRagPolicy
from engine.policies.infoflow import InfoFlowPolicy
from engine.policies.interface import Policy
from engine.policies.none import NonePolicy
from engine.policies.prophet import ProphetPolicy
from engine.policies.random import RandomPolicy
from schemas.errors import InputError

POLICIES: dict[str, Callable[..., Policy]] = {
    "none": NonePolicy,
    "composite": CompositePolicy,
    "epic": EpicPolicy,
    "cacheblend": CacheBlendPolicy,
    "fusionrag": FusionRagPolicy,
    "infoflow": InfoFlowPolicy,
    "prophet": ProphetPolicy,
    "closure": ClosurePolicy,
    "random": RandomPolicy,
    "full": FullPolicy,
}

SERVED_LAYOUT = "reordered"  # prompts of the service are planned in no other


def create_policy(name: str, **options: Any) -> Policy:
    """The policy of that name.

    Args:
        name: one of `POLICIES`.
        options: its own, as its class takes them, such as `layers=[12, 14]` or `mode="gradual"`.

    Raises:
        InputError: there is no policy of that name, or it does not take these options.
    """
    if name not in POLICIES:
        raise InputError(f"there is no selection policy {name!r}; known are {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise InputError(f"selection policy {name} cannot be made with {options}: {error}") from error
