"""Who may import whom, and what importing costs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "sentence_transformers", "apache_beam", "fastapi", "qdrant_client", "kafka", "triton")

# door -> what importing it must not pull in
LIGHT = {
    "schemas": (*HEAVY, "obstore", "pyarrow", "pydantic"),
    "schemas.events, schemas.settings, schemas.api, schemas.kv_artifact, schemas.chunk": (*HEAVY, "obstore", "pyarrow"),
    "stores": ("torch", "transformers", "sentence_transformers", "apache_beam", "fastapi", "triton"),
    "kernels": ("transformers", "sentence_transformers", "apache_beam", "fastapi", "qdrant_client", "kafka", "triton"),
    "engine": ("apache_beam", "fastapi", "qdrant_client", "kafka", "obstore"),
    "ingest": ("fastapi", "torch"),
    "serve": ("apache_beam", "torch"),
    "quality": HEAVY,
    "cli": (*HEAVY, "obstore", "pyarrow", "pydantic", "httpx", "rich"),
    "kvquilt": (*HEAVY, "obstore", "pyarrow", "httpx", "pydantic"),
}


@pytest.mark.parametrize("door", LIGHT)
def test_a_door_does_not_import_what_its_callers_may_not_need(door):
    """Bug: `kvquilt --help` took ten seconds because a package imported torch at its door."""
    program = f"import sys, {door}; print(*(set({LIGHT[door]!r}) & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == ""


def test_the_layers_hold():
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_transformers_works_beside_our_package_called_kernels():
    """Bug: Hugging Face publishes an optional package called kernels; transformers must not take ours for it."""
    program = (
        "import kernels, sys; from transformers.utils import is_kernels_available as there; "
        "from transformers import LlamaConfig, LlamaForCausalLM; print(there(), kernels.__file__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    there, file = result.stdout.split()
    assert there == "False"
    assert Path(file).is_relative_to(ROOT)
