"""cos and sin of a model's own rotary embedding, from a deep copy of its module: nothing is typed again here.

Every RoPE type of transformers ends in inverse frequencies and one attention scaling m, per layer type where the
model has several. angle = float32(position) * inv_freq, and the tables are cos * m and sin * m, in fp32, only for
the span of positions in use. For types whose frequencies depend on the length (dynamic, longrope) all keys of a
prompt take the frequencies of its final length; the copy keeps a long call from changing the live module.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from kernels.layout import RopeLayout
from kernels.rope_probe import NO_ROTATION, Decoder, find_decoder, frequencies, probe_layers

_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class RopeTables:
    """The tables of one model. Build with `from_model`; immutable, safe to share between threads."""

    layout: RopeLayout
    table_names: tuple[str, ...]  # one per table: layer types, `default`, and `none` for layers without rotation
    table_of_layer: tuple[int, ...]  # [L] number of each layer's table
    length_dependent: bool  # frequencies depend on the final length of the prompt
    digests: dict[str, str]  # per table name: SHA-256 of all that decides its numbers, for the fingerprint
    _decoder: Decoder

    @classmethod
    def from_model(cls, model: Any) -> RopeTables:
        """Copy the rotary module and prove on every layer that our rotation is the model's.

        Args:
            model: a causal LM of transformers, weights loaded, no hooks registered yet.

        Raises:
            UnsupportedModelError: the layout is not one we know; one sentence says what did not agree.
        """
        decoder = find_decoder(model)
        layout, table_of_layer = probe_layers(decoder)
        names = tuple(dict.fromkeys(sorted(table_of_layer, key=lambda name: (name == NO_ROTATION, name))))
        kinds = {name: decoder.rope_type(name) for name in names if name != NO_ROTATION}
        digests = {
            name: _digest(decoder, name, layout, [n for n, used in enumerate(table_of_layer) if used == name])
            for name in names
        }
        return cls(
            layout=layout,
            table_names=names,
            table_of_layer=tuple(names.index(name) for name in table_of_layer),
            length_dependent=any(kind in _LENGTH_DEPENDENT for kind in kinds.values()),
            digests=digests,
            _decoder=decoder,
        )

    def tables(
        self, start: int, end: int, final_length: int | None = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin, each `[tables, end - start, R/2]` fp32, for positions start … end - 1; m included.

        Args:
            start, end: half-open range of absolute positions.
            final_length: tokens of the whole prompt; needed where `length_dependent`, ignored elsewhere.
            device: where the tables go.
        """
        if self.length_dependent and final_length is None:
            raise ValueError(
                "final_length is needed: the rotary frequencies of this model depend on the prompt's length"
            )
        positions = torch.arange(start, end, dtype=torch.float32)
        cos, sin = [], []
        for name in self.table_names:
            if name == NO_ROTATION:
                cos.append(torch.ones(end - start, self.layout.rotary_dim // 2))
                sin.append(torch.zeros(end - start, self.layout.rotary_dim // 2))
                continue
            inv_freq, scaling = frequencies(self._decoder.rotary, self._decoder.prefix(name), final_length or end)
            angle = positions[:, None] * inv_freq
            cos.append(angle.cos() * scaling)
            sin.append(angle.sin() * scaling)
        return torch.stack(cos).to(device), torch.stack(sin).to(device)


def _digest(decoder: Decoder, name: str, layout: RopeLayout, layers: list[int]) -> str:
    """SHA-256 over frequencies, m, layout and the layers that use them; the config too where the length decides."""
    state = hashlib.sha256()
    facts: dict[str, Any] = {"layout": layout.name, "rotary_dim": layout.rotary_dim, "layers": layers}
    if name != NO_ROTATION:
        facts["rope_type"] = decoder.rope_type(name)
        inv_freq, facts["attention_scaling"] = frequencies(decoder.rotary, decoder.prefix(name), 1)
        state.update(inv_freq.numpy().astype("<f4").tobytes())
        if facts["rope_type"] in _LENGTH_DEPENDENT:
            facts["rope_parameters"] = decoder.rope_parameters(name)
            facts["max_position_embeddings"] = decoder.config.max_position_embeddings
    state.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return state.hexdigest()


def probe(model: Any) -> RopeLayout:
    """The rotary layout of a model; see `RopeTables.from_model`, which every caller that needs tables uses instead."""
    return probe_layers(find_decoder(model))[0]
