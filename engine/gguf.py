"""Convert a GGUF file to a safetensors folder: de-quantised to float32, with config, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.building import building
from schemas.errors import UnsupportedModelError

# llama.cpp names the text splitter of a BPE tokenizer; the converter in transformers does not read the name, and
# these split every digit off before the byte-level step. Without it "a  1" gets ids that the model never saw.
_SPLITS_DIGITS = {"smollm"}


def convert(gguf: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer's files into `folder`.

    Raises:
        UnsupportedModelError: the file is damaged, or of an architecture that transformers cannot read.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with building():
            tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except Exception as error:
        raise UnsupportedModelError(f"{gguf.name}: this GGUF file cannot be read: {error}") from error
    if _text_splitter(gguf) in _SPLITS_DIGITS:
        _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict()
    for gone in ("quantization_config", "_name_or_path"):
        config.pop(gone, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    model.generation_config.save_pretrained(folder)
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # tied weights are stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _text_splitter(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


def _split_digits(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
