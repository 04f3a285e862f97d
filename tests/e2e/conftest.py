"""`kvquilt up` as a child process, over the packaged models or over a tiny one with the same tokenizer."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.service import Service
from demo.child import Up
from schemas.settings import load_settings

ROOT = Path(__file__).parents[2]


class World:
    """A running `kvquilt up`, its service, and the command line beside it."""

    def __init__(self, up, running):
        self.up, self.running = up, running
        self.folder = up.folder
        self.settings = load_settings(
            {
                "data_dir": str(up.folder),
                "client": {"url": running.url},
                "kafka": {"bootstrap": running.bootstrap},
            }
        )
        self.service = Service.of(self.settings)

    def close(self):
        """Close the connection, and stop at the latest now."""
        self.service.close()
        self.up.stop()

    def kvquilt(self, *arguments, code=0):
        """Run a command over the same data folder; its JSON."""
        command = [
            sys.executable,
            "-m",
            "kvquilt",
            *arguments,
            "--data-dir",
            str(self.folder),
            "--format",
            "json",
            "-q",
        ]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert result.returncode == code, result.stderr + self.up.log_end()
        return json.loads(result.stdout) if result.stdout else result.stderr

    def publish(self, doc_id, text, *options):
        """Write a file, publish it and wait until text and KV are servable."""
        file = self.folder / "files" / doc_id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self.kvquilt("publish", str(file), "--root", str(self.folder / "files"), "--wait", *options)

    def ask(self, question, **fields):
        """The answer's body."""
        return self.service.post("/v1/answer", {"question": question, "max_tokens": 8, **fields})


@pytest.fixture(scope="session")
def quiet_environment():
    """Settings of the person who runs the tests must not reach the children."""
    names = [name for name in os.environ if name.startswith("KVQUILT_") and not name.startswith("KVQUILT_TEST_")]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, quiet_environment):
    """A two-layer Llama with random weights behind SmolLM2's tokenizer, in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.models import model_folder

    source = model_folder("smollm2", load_settings().cache_folder)
    folder = tmp_path_factory.mktemp("tiny-model")
    for file in source.iterdir():
        if "token" in file.name or file.suffix in (".jinja", ".txt"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
        )
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory, quiet_environment):
    """Everything running over the packaged models, in float32 so that equal sums give equal answers.

    Nothing is kept in memory between questions: what is asked is what the stores hold.
    """
    flags = ("model.dtype=float32", "serve.prefix_cache_bytes=0", "serve.host_tier_bytes=0")
    with Up(tmp_path_factory.mktemp("world") / "data", *(part for flag in flags for part in ("--set", flag))) as up:
        world = World(up, up.wait_ready())
        yield world
        world.close()


@pytest.fixture
def start_tiny(tiny_model):
    """Start `kvquilt up` over the tiny model in a folder; stopped at the end at the latest."""
    with ExitStack() as stack:

        def start(folder):
            up = stack.enter_context(Up(folder, "--set", f"model.name={tiny_model}", "--set", "model.dtype=float32"))
            world = World(up, up.wait_ready())
            stack.callback(world.close)
            return world

        yield start
