"""Fixtures of the ingest tests."""

import pytest

from tests.ingest.formats_world import formats_world
from tests.ingest.world import World


@pytest.fixture
def world():
    """Stores in memory and fake models; see `World`."""
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """A reader of events, with a schema registry and a web server on loopback; see `Formats`."""
    with formats_world(tmp_path_factory.mktemp("content").resolve()) as formats:
        yield formats
