"""Which layers a question pass looks at, by relative depth."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import InputError


def layers_at(n_layers: int, depths: Sequence[float]) -> tuple[int, ...]:
    """Layers at the given depths (0 the first, below 1 the last), each once, ascending."""
    return tuple(sorted({min(int(n_layers * depth + 1e-9), n_layers - 1) for depth in depths}))


def named_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Layers that somebody named, checked.

    Raises:
        InputError: there is none, or the model does not have one of them.
    """
    if not layers or min(layers) < 0 or max(layers) >= n_layers:
        raise InputError(f"layers {list(layers)} cannot be scored; the model has layers 0 to {n_layers - 1}")
    return tuple(sorted(set(layers)))
