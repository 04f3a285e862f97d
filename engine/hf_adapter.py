"""The only module that touches transformers' models, caches and attention functions.

A forward pass runs at any positions, over rows that live with us: `cache.update` hands a layer's new rows to a
`RowSet`, and our attention function, registered under a name of its own, asks the same row set for the result. So
one mechanism serves chunk prefill, full prefill, the question pass, decode and repair, for every family whose
attention goes through transformers' attention interface; transformers builds no mask and keeps no cache.
"""

from __future__ import annotations

import copy
import inspect
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.building import building
from engine.models import remembered
from kernels import RopeTables
from schemas.errors import UnsupportedModelError
from schemas.ids import digest

ATTENTION = "kvquilt"  # not registered with a mask function: transformers then builds no mask
_ROW_SET = "_kvquilt_row_set"  # travels on the key tensor: not every family hands keyword arguments on
SPEC_FORMAT = 2  # raise it when `ModelSpec` or the probe changes


class Enough(Exception):  # noqa: N818 - not a fault: the pass has what it wanted
    """Raised by a row set in the middle of a forward pass to end it."""


class RowSet(Protocol):
    """The KV rows one forward pass reads and writes. Positions were told to it before the pass."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the rows of this pass, `[H, S, D]` each, keys rotated."""

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attention of `q [Hq, S, D]` over all rows that each query may see: `[Hq, S, D]`."""


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and rotation of a model, from its config alone.

    `reuse_refusal` is one sentence where the model's KV cannot be reused at other positions; rope fields are then
    empty.
    """

    n_layers: int  # L
    n_kv_heads: int  # H
    n_groups: int  # G
    head_dim: int  # D
    rotary_dim: int  # R
    rope_layout: str
    rope_digests: dict[str, str]
    vocab_size: int
    max_tokens: int  # longest sequence whose rows are all rotated alike
    reuse_refusal: str | None


def read_config(folder: Path) -> Any:
    """The text decoder's configuration.

    Raises:
        UnsupportedModelError: it cannot be read, or is not a decoder with attention heads.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder.name}: its config.json cannot be read: {error}") from error
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "num_attention_heads", None):
        raise UnsupportedModelError(f"{folder.name}: {config.model_type} is not a causal language model with attention")
    return config


def read_spec(folder: Path, cache: Path) -> ModelSpec:
    """Shapes and rotation, remembered per configuration and transformers version.

    The rotation is probed on a small model of the same configuration with random weights.
    """
    config = read_config(folder)
    key = digest([SPEC_FORMAT, transformers.__version__, json.loads(config.to_json_string(use_diff=False))])
    return ModelSpec(**remembered(cache / "specs" / f"{key}.json", lambda: asdict(spec_of(config))))


def spec_of(config: Any) -> ModelSpec:
    """As `read_spec`, from a configuration, not remembered."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    refusal = _window_refusal(config)
    try:
        tables = None if refusal else RopeTables.from_model(_small_model(config))
    except UnsupportedModelError as error:
        tables, refusal = None, str(error)
    return ModelSpec(
        n_layers=int(config.num_hidden_layers),
        n_kv_heads=kv_heads,
        n_groups=heads // kv_heads,
        head_dim=_head_dim(config),
        rotary_dim=tables.layout.rotary_dim if tables else 0,
        rope_layout=tables.layout.name if tables else "none",
        rope_digests=dict(tables.digests) if tables else {},
        vocab_size=int(config.vocab_size),
        max_tokens=_longest(config),
        reuse_refusal=refusal,
    )


class HfModel:
    """A causal LM of transformers that runs over our rows. Not thread-safe: `engine.model` holds the lock."""

    def __init__(self, model: Any) -> None:
        """Take over a model whose attention implementation is `ATTENTION`."""
        self.module: Any = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._decoder = model.base_model  # without the head: for passes whose logits nobody reads
        stacks = [part.layers for part in model.modules() if isinstance(getattr(part, "layers", None), ModuleList)]
        self.layers: list[Any] = list(stacks[0]) if len(stacks) == 1 else []
        self._n_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._cache_argument = _cache_argument(type(model).forward)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: RowSet) -> None:
        """Compute the rows of `ids [S]` at `positions [S]`; no logits.

        The pass ends with the last layer's rows: what that layer would make of them, nobody reads.
        """
        with suppress(Enough):
            self._forward(self._decoder, ids, positions, rows, last=self._n_layers - 1)

    def look(self, ids: torch.Tensor, positions: torch.Tensor, rows: RowSet) -> None:
        """As `run`, through the last layer's attention; `rows` may end it sooner by raising `Enough`."""
        with suppress(Enough):
            self._forward(self._decoder, ids, positions, rows)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, rows: RowSet, keep: int = 1) -> torch.Tensor:
        """As `run`, and the logits of the last `keep` rows, `[keep, vocab]`; 0 keeps all."""
        out = self._forward(self.module, ids, positions, rows, logits_to_keep=keep)
        logits: torch.Tensor = out.logits[0]
        return logits

    def plain_logits(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `[S, vocab]` of a plain forward pass with the model's own attention and no cache; for checks.

        Args:
            ids: `[S]`.
            positions: `[S]`; 0, 1, 2, … without.
            visible: bool `[S, S]`, which row sees which; causal without. Only with `positions`.
        """
        options: dict[str, Any] = {}
        if positions is not None and visible is not None:
            hidden = torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
            mask = hidden[None, None].to(self.device)
            kinds = getattr(self.module.config, "layer_types", None)  # such families take a mask per kind of layer
            options["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), mask) if kinds else mask
            options["position_ids"] = positions[None].to(self.device)
        self.module.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.module(input_ids=ids[None].to(self.device), use_cache=False, **options).logits[
                0
            ]
            return logits
        finally:
            self.module.set_attn_implementation(ATTENTION)

    def _forward(
        self,
        part: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: RowSet,
        last: int | None = None,
        **kwargs: Any,
    ) -> Any:
        device = self.device
        return part(
            input_ids=ids[None].to(device),
            position_ids=positions[None].to(device),
            use_cache=True,
            **{self._cache_argument: _RowCache(rows, last)},
            **kwargs,
        )


def load_hf(folder: Path, dtype: str, device: torch.device) -> HfModel:
    """Load config and weights.

    Raises:
        UnsupportedModelError: the files are damaged, or the family's attention is not open to us.
    """
    try:
        with building():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(f"{folder.name}: the model cannot be loaded: {error}") from error
    return HfModel(model.to(device))


def _small_model(config: Any) -> Any:
    """A model of the same family and the same rotation, with little else: for probing."""
    small = copy.deepcopy(config)
    head_dim = _head_dim(config)
    small.num_attention_heads = 2
    if getattr(small, "num_key_value_heads", None):
        small.num_key_value_heads = min(2, small.num_key_value_heads)
    small.hidden_size, small.intermediate_size = 2 * head_dim, 32
    if getattr(small, "head_dim", None):
        small.head_dim = head_dim
    small.vocab_size = 8
    small.pad_token_id = small.bos_token_id = small.eos_token_id = 0
    for attempt in (small, config):  # a family whose sizes depend on one another is built in full
        try:
            with building(), torch.random.fork_rng(devices=[]):
                return AutoModelForCausalLM.from_config(attempt)
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            failure = error
    raise UnsupportedModelError(f"{config.model_type} cannot be built from its configuration: {failure}")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _longest(config: Any) -> int:
    """What the model was made for; with longrope the length at which its frequencies change.

    transformers picks them by the length of each forward pass. A prompt beyond that length would be a mixture of rows
    with both, from earlier passes and from chunks, where the model's own pass over the whole has one.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    changes = [int(one["original_max_position_embeddings"]) for one in tables if one.get("rope_type") == "longrope"]
    return min([longest, *changes])


def _window_refusal(config: Any) -> str | None:
    """Sliding windows matter for reuse when they are shorter than the longest prompt of the model."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = any(kind != "full_attention" for kind in kinds) if kinds else bool(window)
    if getattr(config, "use_sliding_window", True) is False:
        slides = False
    if not slides:
        return None
    if window is None:
        return f"{config.model_type} has layers of kinds {sorted(set(kinds or []))}; reuse needs full attention"
    longest = int(getattr(config, "max_position_embeddings", None) or 0)
    if window >= longest:
        return None
    return (
        f"{config.model_type} has layers with a sliding window of {window} tokens, shorter than its {longest} "
        "positions: chunks behind the window would not be seen, so it is served in exact mode only"
    )


def _cache_argument(forward: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class _RowCache(Cache):  # type: ignore[misc] # transformers is untyped
    """What transformers takes for its cache: it hands new rows over and keeps nothing; it ends the pass at `last`."""

    def __init__(self, rows: RowSet, last: int | None) -> None:
        super().__init__(layers=[])
        self._rows, self._last = rows, last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._rows.store(layer_idx, key_states[0], value_states[0])
        if layer_idx == self._last:
            raise Enough
        setattr(key_states, _ROW_SET, self._rows)  # the attention function gets this very tensor next
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given


def _attention(
    module: Any,
    query: torch.Tensor,  # [1, Hq, S, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the row set that the forward pass was started with."""
    row_set: RowSet | None = getattr(key, _ROW_SET, None)
    for feature in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(feature) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {feature}, which our attention does not have")
    if row_set is None or attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} attends to other keys than those of its cache")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    out = row_set.attend(module.layer_idx, query[0], scale, sliding_window)
    return out.transpose(0, 1)[None].contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
