"""Models are built one at a time in a process, whoever asks: transformers patches its own classes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers as tf

from engine.building import building
from engine.embedder import load_embedder
from engine.hf_adapter import load_hf, read_spec
from engine.models import model_folder
from schemas.settings import EmbedderSettings
from tests.engine.conftest import SHAPE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose output layer is its embedding: only tying gives that layer its data."""
    folder = tmp_path_factory.mktemp("hub") / "tied"
    tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def ways(tied: Path, cache: Path) -> dict[str, Callable[[], object]]:
    """Each place of ours that builds a model, never from memory."""
    return {
        "weights": lambda: load_hf(tied, "float32", CPU),
        "probe": lambda: read_spec(tied, cache),
        "embedder": lambda: load_embedder(EmbedderSettings(dtype="float32"), cache),
    }


@pytest.mark.parametrize("way", ["weights", "probe", "embedder"])
def test_no_model_is_built_while_another_one_is(way: str, tied: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with building():
            late = pool.submit(ways(tied, tmp_path)[way])
            with pytest.raises(TimeoutError):
                late.result(timeout=1)
        late.result(timeout=60)


@pytest.mark.slow
def test_no_gguf_file_is_converted_while_another_model_is_built(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with building():
            late = pool.submit(model_folder, "smollm2", tmp_path)
            with pytest.raises(TimeoutError):
                late.result(timeout=10)
        late.result(timeout=120)


def test_models_that_many_threads_load_are_whole_and_leave_transformers_as_it_was(tied: Path) -> None:
    """Loaded at the same time, each of three tries ended with an output layer without data."""
    before = tf.PreTrainedModel.tie_weights
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: load_hf(tied, "float32", CPU), range(64)))
    assert {p.device.type for model in models for p in model.module.parameters()} == {"cpu"}
    assert tf.PreTrainedModel.tie_weights is before
