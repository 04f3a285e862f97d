"""One tiny model per family for the whole run."""

from functools import lru_cache

import pytest

from tests.kernels.rope_families import build


@pytest.fixture(scope="session")
def tiny_model():
    """`tiny_model("gemma3")`: shared, so tests must leave it as it is."""
    return lru_cache(build)
