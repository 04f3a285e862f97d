"""Our package `kernels` beside transformers, which knows an optional package of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import refuse_foreign_kernels
from schemas import foreign
from schemas.errors import SettingsError

ROOT = Path(__file__).parents[2]


def run(program):
    return subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_transformers_is_not_fooled_by_our_package():
    """It takes the version of whatever distribution owns `kernels`; a kvquilt 0.18.2 would be imported as the hub's."""
    done = run(
        "import transformers, sys;"
        "from transformers.utils import is_kernels_available;"
        "import transformers.models.llama.modeling_llama;"
        "assert not is_kernels_available();"
        "import kernels; print(kernels.__file__)"
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split()[-1]) == ROOT / "kernels" / "__init__.py"


def test_our_door_starts_nothing():
    """transformers looks at the package while it is being imported itself: torch stays out until it is used."""
    done = run("import kernels, sys; assert not {'torch', 'triton', 'transformers'} & set(sys.modules), 'too early'")
    assert done.returncode == 0, done.stderr


def test_every_name_at_the_door_exists():
    import kernels

    assert sorted(kernels._HOME) == sorted(kernels.__all__)
    assert all(callable(getattr(kernels, name)) for name in kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'get_kernel'"):
        _ = kernels.get_kernel


def test_start_up_is_refused_where_the_other_package_is_installed(monkeypatch):
    """One of the two would be imported in place of the other, and fail later with a name that nobody expects."""
    refuse_foreign_kernels()
    monkeypatch.setattr(foreign, "FOREIGN_DISTRIBUTION", "torch")  # any distribution that is installed
    with pytest.raises(
        SettingsError, match=r"package 'kernels' .* from Hugging Face is installed .*pip uninstall kernels"
    ):
        refuse_foreign_kernels()
