"""From a name to files to a model: conversion, fingerprint, dtype, what is refused, what is imported when."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf

from engine import load_model, load_tokenizer, models, resolve_fingerprint, resolve_generation
from engine.dtype import resolve_dtype
from engine.models import display_name, embedder_folder, file_sha256, model_folder, remembered, weights_digest
from schemas.errors import SettingsError, UnsupportedModelError
from schemas.settings import ModelSettings, Settings
from tests.engine.conftest import SHAPE, byte_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as Hugging Face writes it."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)).save_pretrained(folder)
    byte_tokenizer()._hf.save_pretrained(folder)
    return folder


def test_the_fingerprint_is_known_without_weights_and_is_the_loaded_models(folder: Path, tmp_path: Path) -> None:
    """Ingest and serve name artifacts by it before either has loaded the model."""
    settings = ModelSettings(name=str(folder), dtype="float32")
    before = resolve_fingerprint(settings, tmp_path)
    model = load_model(settings, tmp_path)
    assert model.fingerprint == before
    assert (before.model, before.dtype, before.rope_layout, before.rotary_dim) == ("tiny", "float32", "half_split", 16)
    assert load_model(settings, tmp_path) is model, "one model per process and settings"


def test_the_generation_changes_with_all_that_decides_what_is_stored(folder: Path, tmp_path: Path) -> None:
    base = {"cache_dir": tmp_path, "model": {"name": str(folder), "dtype": "float32"}}
    variants = [
        base,
        {**base, "chunker": {"max_tokens": 100}},
        {**base, "prompt": {"system": "Be brief."}},
        {**base, "model": {"name": str(folder), "dtype": "bfloat16"}},
        {**base, "prefill": {"variant": "company"}},
        {**base, "prefill": {"variant": "fused"}},
        {**base, "prefill": {"variant": "fused", "neighbours": 3}},
    ]
    names = [resolve_generation(Settings(**variant)).generation.name for variant in variants]
    assert len(set(names)) == len(names)
    assert resolve_generation(Settings(**base)).generation.name == names[0]
    idle = {"neighbours": 3, "max_changes_per_day": 0}  # without fused chunks neither decides anything
    assert resolve_generation(Settings(**base, prefill=idle)).generation.name == names[0]


def test_emb_03_another_embedder_of_the_same_name_is_another_generation(folder: Path, tmp_path: Path) -> None:
    """Vectors of two encoders in one index give wrong neighbours, and no error."""
    other = tmp_path / "minilm"
    shutil.copytree(embedder_folder("minilm"), other, copy_function=os.symlink)
    base = {"cache_dir": tmp_path, "model": {"name": str(folder), "dtype": "float32"}}
    packaged = resolve_generation(Settings(**base)).generation
    same = resolve_generation(Settings(**base, embedder={"name": str(other)})).generation
    assert same.name == packaged.name, "where the files are decides nothing"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-6}))
    changed = resolve_generation(Settings(**base, embedder={"name": str(other)})).generation
    assert (changed.embedder, changed.name == packaged.name) == ("minilm", False)


def test_what_stands_in_front_of_chunks_is_part_of_the_generation(folder: Path, tmp_path: Path) -> None:
    """Another company text makes other rows under the same token ids."""
    base = {"cache_dir": tmp_path, "model": {"name": str(folder), "dtype": "float32"}}
    (tmp_path / "company.txt").write_text("Some plain prose.")
    own = {"variant": "company", "company": tmp_path / "company.txt"}
    packaged = resolve_generation(Settings(**base, prefill={"variant": "company"}))
    other = resolve_generation(Settings(**base, prefill=own))
    assert packaged.generation.name != other.generation.name
    assert other.front_ids[: len(other.template.prefix_ids)] == other.template.prefix_ids
    fused = resolve_generation(Settings(**base, prefill={"variant": "fused"}))
    assert (fused.front_ids, fused.variant.pass1) == (fused.template.prefix_ids, "shared_prefix")
    with pytest.raises(SettingsError, match=r"prefill\.company: the file .* cannot be read"):
        resolve_generation(Settings(**base, prefill={"variant": "company", "company": tmp_path / "none.txt"}))


def test_kv_04_changed_weights_change_the_fingerprint_and_a_rewritten_config_version_does_not(
    folder: Path, tmp_path: Path
) -> None:
    """A hot update of the weights must not meet old KV."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_digest(copy, tmp_path) == weights_digest(folder, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert weights_digest(copy, tmp_path) == weights_digest(folder, tmp_path)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert weights_digest(copy, tmp_path) != weights_digest(folder, tmp_path)


@pytest.mark.parametrize("find", [lambda name, cache: model_folder(name, cache), lambda name, _: embedder_folder(name)])
def test_kv_04_an_adapter_beside_the_weights_is_refused(
    folder: Path, tmp_path: Path, find: Callable[[str, Path], Path]
) -> None:
    """Bug: its scaling was in no fingerprint, and whether it was applied depended on what else was installed."""
    adapted = tmp_path / "adapted"
    shutil.copytree(folder, adapted)
    assert find(str(adapted), tmp_path) == adapted
    (adapted / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 16}')
    with pytest.raises(UnsupportedModelError, match="the folder holds an adapter"):
        find(str(adapted), tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder or .gguf file"),
        ("/nowhere/model.gguf", "no such folder or .gguf file"),
        ("empty", "holds no config.json"),
    ],
)
def test_models_that_are_not_there_are_refused_with_what_was_looked_for(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModelError, match=message):
        model_folder(str(tmp_path / name) if name == "empty" else name, tmp_path)


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03" + b"\x00" * 40)
    with pytest.raises(UnsupportedModelError, match=r"damaged\.gguf: this GGUF file cannot be read"):
        model_folder(str(damaged), tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    """Pickles run code when they are read."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UnsupportedModelError, match=r"no \*\.safetensors"):
        weights_digest(tmp_path, tmp_path)


def test_a_dtype_is_measured_once_and_remembered(folder: Path, tmp_path: Path) -> None:
    """A dtype that changed from start to start would make a new generation every time."""
    chosen = resolve_dtype(ModelSettings(name=str(folder)), folder, tmp_path)
    assert chosen in ("float32", "bfloat16")
    (kept,) = (tmp_path / "dtypes").iterdir()
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    kept.write_text(json.dumps({"dtype": other}))
    assert resolve_dtype(ModelSettings(name=str(folder)), folder, tmp_path) == other
    assert resolve_dtype(ModelSettings(name=str(folder), dtype="float16"), folder, tmp_path) == "float16"


def test_what_is_remembered_survives_torn_files_and_many_writers(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "value.json"
    file.parent.mkdir()
    file.write_text('{"half')
    assert remembered(file, lambda: {"n": 1}) == {"n": 1}
    assert remembered(file, lambda: {"n": 2}) == {"n": 1}
    file.unlink()
    seen: list[object] = []
    threads = [threading.Thread(target=lambda n=n: seen.append(remembered(file, lambda: {"n": n}))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert [entry.name for entry in file.parent.iterdir()] == ["value.json"]


def test_a_file_that_changed_is_hashed_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = file_sha256(file, tmp_path)
    file.write_bytes(b"three")
    assert file_sha256(file, tmp_path) != first


def test_identities_hold_no_machine_paths(folder: Path) -> None:
    assert display_name(str(folder)) == "tiny"
    assert display_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_the_door_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine, engine.models, engine.plan, engine.tokenizer, engine.prompt, engine.embedder\n"
        "print(sorted({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"


def test_every_name_of_the_door_is_there() -> None:
    import engine

    assert all(getattr(engine, name) is not None for name in engine.__all__)
    assert dir(engine) == engine.__all__ == sorted(engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = engine.nothing


def test_eng_06_only_the_adapter_touches_caches_and_attention_functions_of_transformers() -> None:
    """Their names change from release to release: one file has to follow."""
    words = ("past_key_values", "ALL_ATTENTION_FUNCTIONS", "import Cache", "DynamicCache", ".key_cache")
    offenders = [
        (file.name, word)
        for file in (ROOT / "engine").glob("*.py")
        for word in words
        if file.name != "hf_adapter.py" and word in file.read_text()
    ]
    assert offenders == []
    assert models.__name__ == "engine.models"


def test_a_tokenizer_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(ModelSettings(name=str(bare)), tmp_path)
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert tokenizer.stop_ids == {2}
