"""Loading the LLM that the settings name: one per process."""

from __future__ import annotations

import threading
from functools import cache as memoised
from pathlib import Path

import torch

from engine.dtype import resolve_device, resolve_dtype
from engine.hf_adapter import load_hf, read_config, read_spec
from engine.identity import make_fingerprint
from engine.model import Model
from engine.models import display_name, model_folder, weights_digest
from engine.tokenizer import load_tokenizer
from kernels import refuse_foreign_kernels
from schemas.settings import ModelSettings

_LOADING = threading.Lock()


def load_model(model: ModelSettings, cache: Path) -> Model:
    """The LLM that the settings name; one per process and settings, whoever asks first loads it.

    Raises:
        UnsupportedModelError: it cannot be found, loaded, or served.
        SettingsError: another package `kernels` is installed.
    """
    with _LOADING:
        return _load(model, cache)


@memoised
def _load(model: ModelSettings, cache: Path) -> Model:
    refuse_foreign_kernels()
    if model.threads:
        torch.set_num_threads(model.threads)
    folder = model_folder(model.name, cache)
    tokenizer = load_tokenizer(model, cache)
    dtype, spec = resolve_dtype(model, folder, cache), read_spec(folder, cache)
    weights = weights_digest(folder, cache)
    fingerprint = make_fingerprint(display_name(model.name), spec, weights, tokenizer.digest, dtype)
    hf = load_hf(folder, dtype, resolve_device(model.device))
    return Model(hf, spec, fingerprint, tokenizer, model_type=read_config(folder).model_type)
