"""The stitch kernel as machine code for Hopper: wide accesses, no spills. Needs no GPU, only Triton's own tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is installed on Linux only")


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """Compiled in a child: the kernels of this process may be interpreted ones."""
    cache = tmp_path_factory.mktemp("triton")
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot.compile_stitch"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_accesses_of_rows_stay_wide(machine_code):
    """A change of one index expression turns 8 wide loads into 64 narrow ones, and no result changes."""
    for name, code in machine_code.items():
        assert set(code["stores"]) == {"128"}, (name, code)
        assert "128" in code["loads"], (name, code)
        assert "16" not in code["loads"], (name, code)


def test_nothing_spills(machine_code):
    """Beyond 128 registers fewer programs run at once; a stack means that rows travel to memory twice."""
    for name, code in machine_code.items():
        assert code["stack"] == 0, (name, code)
        assert code["registers"] <= 128, (name, code)
