"""Find out how a model rotates its keys by watching each of its attention layers do it.

Every attention layer is copied (fp32, CPU) and called twice on the same random input: with cos = 1 and sin = 0, and
with the tables of the model's own rotary module. What it hands to the cache are its keys before and after rotation.
Exactly one of our candidates must turn the first into the second, at short and at long positions: half-split or
interleaved pairs, either sign, or no rotation at all. Anything else is refused: an answer from keys that were
rotated almost right looks plausible, and is wrong.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from kernels.layout import RopeLayout
from kernels.reference.rope import rotate
from schemas.errors import UnsupportedModelError

NO_ROTATION = "none"
DEFAULT_TABLE = "default"
TOLERANCE = 1e-5  # of the largest element, in fp32
_POSITION_SETS = ((0, 1, 7), (1, 777, 32_767))  # short and long: dynamic and longrope differ between them
_CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")  # the name has changed over the years


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parts of a model that decide the rotation."""

    config: Any  # of the text decoder
    layers: Any  # its decoder layers
    rotary: Any  # its rotary module, a deep copy: fp32, CPU, nobody else's

    @property
    def layer_types(self) -> list[str]:
        """The table name of each layer, before probing."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds and any(hasattr(self.rotary, f"{kind}_inv_freq") for kind in kinds):
            return list(kinds)
        return [DEFAULT_TABLE] * len(self.layers)

    def prefix(self, table: str) -> str:
        """What the rotary module's attribute names of this table begin with."""
        return "" if table == DEFAULT_TABLE else f"{table}_"

    def rope_type(self, table: str) -> str:
        """The rope type of a table, as the rotary module has it."""
        kind = self.rotary.rope_type
        return str(kind if table == DEFAULT_TABLE else kind[table])

    def rope_parameters(self, table: str) -> dict[str, Any]:
        """The rope parameters of a table, from the config."""
        parameters = self.config.rope_parameters
        return dict(parameters if table == DEFAULT_TABLE else parameters[table])


class _Caught(Exception):  # noqa: N818 - carries the keys out of the attention layer; nothing is wrong
    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys


class _Catcher:
    """Stands in for the cache: the first rows that a layer hands over end its forward pass."""

    def update(self, keys: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _Caught(keys)


def find_decoder(model: Any) -> Decoder:
    """The decoder of a causal LM: the one module that has both `layers` and `rotary_emb`.

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    found = [module for module in model.modules() if hasattr(module, "layers") and hasattr(module, "rotary_emb")]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(found)} modules with decoder layers and a rotary embedding; "
            "reuse needs exactly one, so this model is served in exact mode only"
        )
    (decoder,) = found
    return Decoder(decoder.config, decoder.layers, copy.deepcopy(decoder.rotary_emb).float().cpu())


def frequencies(rotary: Any, prefix: str, final_length: int) -> tuple[torch.Tensor, float]:
    """inv_freq `[R/2]` fp32 and attention scaling for a prompt of `final_length` tokens. `rotary` is left as it was."""
    rotary = copy.deepcopy(rotary)
    _cos_sin(rotary, prefix, torch.tensor([[0]]))  # undoes what an earlier long call may have changed
    _cos_sin(rotary, prefix, torch.tensor([[max(final_length, 1) - 1]]))
    scaling = getattr(rotary, f"{prefix}attention_scaling")
    return getattr(rotary, f"{prefix}inv_freq").float().cpu(), float(scaling)


def probe_layers(decoder: Decoder) -> tuple[RopeLayout, list[str]]:
    """The layout of all rotating layers, and the table name of every layer (`none` where it does not rotate).

    Raises:
        UnsupportedModelError: a layer rotates in a way that no candidate describes, or two layers differ.
    """
    layouts: dict[RopeLayout, int] = {}
    names = []
    shapes = set()
    for number, (layer, name) in enumerate(zip(decoder.layers, decoder.layer_types, strict=True)):
        table = name if hasattr(decoder.rotary, f"{decoder.prefix(name)}inv_freq") else None
        try:
            layout, shape = _probe_layer(decoder, layer, table)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"layer {number}: {error}; it is served in exact mode only") from error
        shapes.add(shape)
        names.append(NO_ROTATION if layout is None or table is None else table)
        if layout is not None:
            layouts.setdefault(layout, number)
    if len(layouts) > 1 or len(shapes) > 1:
        raise UnsupportedModelError(
            f"layers differ in rotary layout ({', '.join(f'{x.name} {x.rotary_dim}' for x in layouts)}) or in the "
            f"shape of their keys ({sorted(shapes)}); it is served in exact mode only"
        )
    return next(iter(layouts), RopeLayout(0)), names


def _probe_layer(decoder: Decoder, layer: Any, table: str | None) -> tuple[RopeLayout | None, tuple[int, int]]:
    """The layout that one layer uses (None: no rotation) and its `(H, D)`."""
    attention = _attention_of(layer)
    generator = torch.Generator().manual_seed(0)
    agreed: list[RopeLayout | None] | None = None
    for numbers in _POSITION_SETS:
        positions = torch.tensor([numbers])
        hidden = torch.randn(1, len(numbers), decoder.config.hidden_size, generator=generator)
        tables = [table] if table else [name for name in decoder.layer_types if _has_table(decoder, name)][:1]
        cos, sin = _cos_sin(copy.deepcopy(decoder.rotary), decoder.prefix(tables[0]), positions)
        before = _keys(attention, hidden, (torch.ones_like(cos), torch.zeros_like(sin)))
        after = _keys(attention, hidden, (cos, sin))
        candidates = _candidates(decoder, tables[0], before, positions[0], numbers[-1] + 1)
        bound = TOLERANCE * float(after.abs().max())
        fits = [layout for layout, keys in candidates if float((keys - after).abs().max()) <= bound]
        agreed = fits if agreed is None else [layout for layout in agreed if layout in fits]
    if agreed is None or len(agreed) != 1:
        raise UnsupportedModelError(
            f"its keys are rotated in a way that we do not know ({len(agreed or [])} of our candidates agree with "
            f"{type(attention).__name__}, expected exactly one)"
        )
    return agreed[0], (before.shape[0], before.shape[2])


def _candidates(
    decoder: Decoder, table: str, keys: torch.Tensor, positions: torch.Tensor, final_length: int
) -> list[tuple[RopeLayout | None, torch.Tensor]]:
    """Every layout we can rotate by, with the keys `[H, T, D]` that it gives; None stands for no rotation."""
    inv_freq, scaling = frequencies(decoder.rotary, decoder.prefix(table), final_length)
    n_rotated = 2 * len(inv_freq)
    angle = positions.float()[:, None] * inv_freq
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    candidates: list[tuple[RopeLayout | None, torch.Tensor]] = [(None, keys)]
    if n_rotated > keys.shape[-1]:
        return candidates
    for interleaved in (False, True) if n_rotated > 2 else (False,):  # one pair is the same in both
        for sign in (1, -1):
            layout = RopeLayout(n_rotated, interleaved, sign)
            candidates.append((layout, rotate(keys, cos, sin, layout)))
    return candidates


def _has_table(decoder: Decoder, name: str) -> bool:
    return hasattr(decoder.rotary, f"{decoder.prefix(name)}inv_freq")


def _attention_of(layer: Any) -> Any:
    """A copy, in fp32 on the CPU, of the submodule that takes position embeddings and a cache."""
    for child in layer.children():
        parameters = inspect.signature(child.forward).parameters
        if "position_embeddings" in parameters and any(name in parameters for name in _CACHE_ARGUMENTS):
            return copy.deepcopy(child).float().cpu().eval()
    raise UnsupportedModelError(f"{type(layer).__name__} has no attention that takes position embeddings and a cache")


@torch.no_grad()
def _keys(
    attention: torch.nn.Module, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The keys `[H, T, D]` that the layer hands to its cache."""
    parameters = inspect.signature(attention.forward).parameters
    argument = next(name for name in _CACHE_ARGUMENTS if name in parameters)
    known = {"hidden_states": hidden, "position_embeddings": position_embeddings, "attention_mask": None}
    try:
        attention(**known, **{argument: _Catcher()})
    except _Caught as caught:
        if caught.keys.dim() != 4 or caught.keys.shape[:3:2] != (1, hidden.shape[1]):
            raise UnsupportedModelError(f"its cache takes keys of shape {tuple(caught.keys.shape)}") from None
        return caught.keys[0]
    except Exception as error:  # foreign code, of any kind: whatever it raises, we do not know this layer
        raise UnsupportedModelError(f"{type(attention).__name__} cannot be called on its own ({error})") from error
    raise UnsupportedModelError(f"{type(attention).__name__} puts nothing into its cache")


@torch.no_grad()
def _cos_sin(rotary: Any, prefix: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rotary module itself returns for positions `[1, T]`."""
    names = {"layer_type": prefix[:-1]} if prefix else {}
    try:
        cos, sin = rotary(torch.zeros(1), positions, **names)
    except Exception as error:  # foreign code, as above
        raise UnsupportedModelError(f"{type(rotary).__name__} gives no cos and sin for positions ({error})") from error
    return cos, sin
