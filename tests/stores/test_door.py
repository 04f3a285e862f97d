"""The door of the package: every name is there, and nobody pays for what he does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stores


def test_every_public_name_can_be_had_from_the_door():
    for name in stores.__all__:
        assert getattr(stores, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        stores.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import stores", {"kafka", "qdrant_client", "obstore"}),
        ("from stores import KvStore, open_blobs", {"kafka", "qdrant_client"}),
        ("from stores import open_index", {"kafka", "obstore", "torch"}),
    ],
)
def test_importing_one_store_does_not_import_the_others(code, absent):
    """The command line answers `--help` in milliseconds; a Qdrant client alone takes a second to import."""
    script = f"{code}\nimport sys\nprint(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
