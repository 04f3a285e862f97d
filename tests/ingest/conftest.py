"""Fixtures of the ingest tests."""

import pytest

from tests.ingest.world import World


@pytest.fixture
def world():
    """Stores in memory and fake models; see `World`."""
    world = World()
    yield world
    world.close()
