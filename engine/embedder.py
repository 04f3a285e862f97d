"""The text encoder that ingest and serve share: one pooling, one normalisation, one identity.

A text longer than the encoder's window is embedded in several windows of about equal length, cut between words:
nothing is ever cut off. A window is a list of the encoder's own token ids, so that no text is tokenised twice.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoised
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.building import building
from engine.models import display_name, embedder_folder, file_sha256, weights_digest
from schemas.errors import UnsupportedModelError
from schemas.ids import digest
from schemas.settings import EmbedderSettings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

WINDOWS = 1  # raise it when texts are cut into windows differently: the vectors change
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class EmbedderIdentity:
    """What the generation says of the encoder; known without loading it."""

    name: str
    sha256: str
    dim: int


def embedder_identity(embedder: EmbedderSettings, cache: Path) -> EmbedderIdentity:
    """Read the encoder's files, not its weights' values.

    Raises:
        UnsupportedModelError: the encoder cannot be found, or does not state its dimension.
    """
    folder = embedder_folder(embedder.name)
    spelled = [[str(file.relative_to(folder)), file_sha256(file, cache)] for file in sorted(folder.rglob("*.json"))]
    sha256 = digest([weights_digest(folder, cache), spelled, WINDOWS])
    return EmbedderIdentity(display_name(embedder.name), sha256, _dimension(folder))


class Embedder:
    """Texts to unit vectors. Safe to use from several threads: one batch runs at a time."""

    def __init__(self, model: SentenceTransformer, identity: EmbedderIdentity, batch_size: int) -> None:
        self.name, self.sha256, self.dim = identity.name, identity.sha256, identity.dim
        self._model, self._batch_size, self._lock = model, batch_size, threading.Lock()
        self._tokenizer: Any = model.tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()  # ours alone: nothing else uses this model object
        self._tokenizer.no_padding()
        probe, plain = self._tokenizer.encode("x").ids, self._tokenizer.encode("x", add_special_tokens=False).ids
        at = probe.index(plain[0])
        self._head, self._tail = probe[:at], probe[at + len(plain) :]
        self._pad_id = int(model.tokenizer.pad_token_id or 0)
        prompts = {name: text or "" for name, text in (model.prompts or {}).items()}
        self._query_prompt = self._ids(prompts.get("query", ""))
        self._document_prompt = self._ids(prompts.get("document", "") or prompts.get("passage", ""))
        longest = max(len(self._query_prompt), len(self._document_prompt))
        self.window_tokens = int(model.max_seq_length or 512) - len(self._head) - len(self._tail) - longest

    def embed(self, texts: Sequence[str]) -> list[Vectors]:
        """One `[n_windows, dim]` float32 array per text, rows of unit length, at least one row each."""
        windows = [self.windows(text) for text in texts]
        rows = self._run([[*self._document_prompt, *window] for text in windows for window in text])
        ends = np.cumsum([len(text) for text in windows])
        return [rows[end - len(text) : end] for end, text in zip(ends, windows, strict=True)]

    def embed_query(self, text: str) -> Vectors:
        """`[dim]` float32 of unit length. A question longer than a window is the mean of its windows."""
        rows = self._run([[*self._query_prompt, *window] for window in self.windows(text)])
        row: Vectors = rows[0] if len(rows) == 1 else _unit(rows.mean(0, keepdims=True))[0]
        return row

    def windows(self, text: str) -> list[list[int]]:
        """The encoder's ids of `text` in as few windows as fit, about equally long, cut between words."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, words = encoding.ids, encoding.word_ids
        windows: list[list[int]] = []
        start, left = 0, math.ceil(len(ids) / self.window_tokens)
        while left > 1 and start < len(ids):
            end = start + min(math.ceil((len(ids) - start) / left), self.window_tokens)
            cut = end
            while cut > start and cut < len(ids) and words[cut] is not None and words[cut] == words[cut - 1]:
                cut -= 1
            end = cut if cut > start else end  # one word longer than a window is cut inside
            windows.append(ids[start:end])
            start = end
            left = max(left - 1, math.ceil((len(ids) - start) / self.window_tokens))
        return [*windows, ids[start:]] if start < len(ids) or not windows else windows

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _run(self, windows: list[list[int]]) -> Vectors:
        import torch

        rows = np.empty((len(windows), self.dim), np.float32)
        order = sorted(range(len(windows)), key=lambda n: len(windows[n]))  # little padding
        for at in range(0, len(order), self._batch_size):
            batch = order[at : at + self._batch_size]
            filled = [[*self._head, *windows[n], *self._tail] for n in batch]
            width = max(map(len, filled))
            ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in filled])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in filled])
            device = self._model.device
            with self._lock, torch.inference_mode():
                out = self._model({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
            rows[batch] = _unit(out["sentence_embedding"].float().cpu().numpy())
        return rows


def load_embedder(embedder: EmbedderSettings, cache: Path) -> Embedder:
    """The text encoder that the settings name; one per process and settings.

    Raises:
        UnsupportedModelError: it cannot be found or loaded.
    """
    with _LOADING:
        return _load(embedder, cache)


_LOADING = threading.Lock()


@memoised
def _load(embedder: EmbedderSettings, cache: Path) -> Embedder:
    import torch
    from sentence_transformers import SentenceTransformer

    identity = embedder_identity(embedder, cache)
    folder = embedder_folder(embedder.name)
    device = None if embedder.device == "auto" else embedder.device
    try:
        with building():
            model = SentenceTransformer(str(folder), device=device, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{embedder.name}: the embedder cannot be loaded: {error}") from error
    dtype: torch.dtype = getattr(torch, _dtype(embedder, folder, cache))
    return Embedder(model.to(dtype).eval(), identity, embedder.batch_size)


def _dtype(embedder: EmbedderSettings, folder: Path, cache: Path) -> str:
    from engine.dtype import resolve_dtype

    try:
        return resolve_dtype(embedder, folder, cache)
    except UnsupportedModelError:  # of another kind than is measured, such as T5's
        return "float32"


def _dimension(folder: Path) -> int:
    """Width of the sentence embedding: of the last dense layer, else of the pooling, else of the model."""
    modules = json.loads((folder / "modules.json").read_text()) if (folder / "modules.json").is_file() else []
    width = None
    for module in modules:
        config = folder / module["path"] / "config.json"
        if module["path"] and config.is_file():
            values = json.loads(config.read_text())
            width = values.get("out_features") or values.get("word_embedding_dimension") or width
    if width is None:
        width = json.loads((folder / "config.json").read_text()).get("hidden_size")
    if not isinstance(width, int):
        raise UnsupportedModelError(f"{folder.name}: neither modules.json nor config.json states the embedding's width")
    return width


def _unit(rows: npt.NDArray[Any]) -> Vectors:
    rows = rows.astype(np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Vectors = np.divide(rows, np.maximum(norms, 1e-12), dtype=np.float32)
    return unit
