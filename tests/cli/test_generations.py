"""`promote`, `rollback`, `gc`, `generations` and doctor over a data folder; `reindex` is in tests/e2e."""

import json
import threading

import pytest

from cli.context import Context, Format
from cli.doctor import _generations
from cli.feeding import others_to_feed, settings_beside, with_live_groups
from cli.generations import gc, generations, promote, rollback
from engine import resolve_generation
from ingest import run_reindex
from ingest.switching import open_generations
from schemas.errors import InputError, SettingsError
from schemas.ids import DocumentKey
from schemas.settings import load_settings
from stores import open_index
from tests.ingest.tiny import make_tiny_model
from tests.stores.generations_world import head_of

DOCUMENT = DocumentKey("default", "d")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def both(model, tmp_path):
    """Settings of two generations of one data folder."""
    common = {
        "data_dir": str(tmp_path / "data"),
        "cache_dir": str(tmp_path / "cache"),
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
    }
    return [load_settings({**common, "chunker": {"max_tokens": n}}) for n in (32, 64)]


@pytest.fixture
def old(both):
    return both[0]


@pytest.fixture
def new(both):
    return both[1]


def generation_of(settings):
    return resolve_generation(settings).generation


def put(settings, version):
    """A document in the generation of `settings`, without chunks."""
    made = generation_of(settings)
    with open_index(settings.qdrant, settings.qdrant_location, made.name, made.embedding_dim) as index:
        index.ensure()
        index.flip(head_of(DOCUMENT, version, made, n_chunks=0))


@pytest.fixture
def built(old, new):
    """The old one is live with a document, the new one is built and lacks it; returns their names."""
    store = open_generations(old)
    for settings in (old, new):
        store.change(lambda now, s=settings: now.add(generation_of(s), s, store.clock.now_ms()))
    name = generation_of(new).name
    store.change(lambda now: now.built(name, store.clock.now_ms()))
    put(old, 1)
    made = generation_of(new)
    with open_index(new.qdrant, new.qdrant_location, made.name, made.embedding_dim) as index:
        index.ensure()
    return generation_of(old).name, name


def said(capsys):
    return json.loads(capsys.readouterr().out)


def test_from_promote_to_gc_on_the_command_line(old, new, built, capsys):
    context = Context(new, Format.JSON)
    with pytest.raises(InputError, match=r"not caught up with the live one: documents missing: 1 \(default/d\)"):
        promote(context, None, force=False, wait_s=0)
    put(new, 1)
    promote(context, None, force=False, wait_s=0)
    assert said(capsys) == {
        "live": built[1],
        "before": built[0],
        "complete": True,
        "gap": "nothing is missing (documents compared: 1)",
    }
    put(new, 2)
    with pytest.raises(InputError, match=r"documents at an older version: 1 \(default/d\)"):
        rollback(context, force=False, wait_s=0)
    rollback(context, force=True, wait_s=0)
    assert said(capsys)["gap"] == "documents at an older version: 1 (default/d)"
    generations(context)
    listed = said(capsys)
    assert (listed["live"], listed["previous"]) == built
    assert [(one["generation"], one["state"]) for one in listed["generations"]] == [
        (built[0], "live"),
        (built[1], "standby"),
    ]
    gc(context, grace_s=None, dry_run=False)
    assert "less than its grace" in said(capsys)["generations"][0]["kept"]
    gc(context, grace_s=0, dry_run=True)
    gc(Context(new), grace_s=0, dry_run=False)
    assert f"{built[1]}  reclaimed: 2 collections" in capsys.readouterr().out
    with pytest.raises(InputError, match="nothing to roll back to: nothing was promoted"):
        rollback(context, force=True, wait_s=0)
    gc(Context(new), grace_s=0, dry_run=False)
    assert "there is no generation but the live one" in capsys.readouterr().out


def test_doctor_says_whether_its_settings_make_the_live_generation(old, new):
    """Bug: pipelines restarted with a changed setting fed an empty generation, and nothing looked wrong."""
    assert _generations(old) == f"none yet; {generation_of(old).name} of these settings is live at its first use"
    store = open_generations(old)
    store.change(lambda now: now.add(generation_of(old), old, 1))
    assert _generations(old).endswith("live; these settings make the live one")
    with pytest.raises(InputError, match=r"does not exist \(chunk_max_tokens 32 there, 64 here\)"):
        _generations(new)
    store.change(lambda now: now.add(generation_of(new), new, 1))
    assert "building; these settings make" in _generations(new)


def test_a_process_feeds_what_may_become_live_and_no_more(old, new, built):
    (other,) = others_to_feed(old)
    assert other.name == built[1]
    assert generation_of(settings_beside(Context(old, quiet=True), old, other)).name == built[1]
    brief = old.generations.model_copy(update={"grace_s": 0})
    assert others_to_feed(old.model_copy(update={"generations": brief})) == []
    assert [one.name for one in others_to_feed(new)] == [built[0]]


def test_a_generation_that_cannot_be_made_here_is_named_and_not_fed(old, built, capsys):
    """Bug: `up` would have stopped because of a model that stands by."""
    (other,) = others_to_feed(old)
    gone = other.model_copy(update={"settings": {**other.settings, "model": {"name": "/nowhere", "dtype": "float32"}}})
    assert settings_beside(Context(old), old, gone) is None
    assert f"generation {built[1]} (built) is not fed here: " in capsys.readouterr().err


def test_waiting_asks_the_groups_of_the_live_generation(old, new, built, tmp_path):
    assert with_live_groups(new).kafka.group_of("index") == "kvquilt.index"
    store = open_generations(old)
    store.change(lambda now: now.promote(built[1], 1))
    assert with_live_groups(old).kafka.group_of("index") == f"kvquilt.{built[1]}.2.index"
    elsewhere = load_settings({"data_dir": str(tmp_path / "elsewhere")})
    assert with_live_groups(elsewhere) == elsewhere
    assert not (tmp_path / "elsewhere").exists()


def test_reindex_refuses_what_is_live_and_what_has_nothing_to_be_beside(old, new, memory_broker):
    def with_broker(settings):
        kafka = settings.kafka.model_copy(update={"bootstrap": memory_broker.bootstrap})
        return settings.model_copy(update={"kafka": kafka})

    with pytest.raises(InputError, match="no generation is live, so there is nothing to build another one beside"):
        run_reindex(with_broker(new), threading.Event())
    store = open_generations(old)
    store.change(lambda now: now.add(generation_of(old), old, 1))
    with pytest.raises(InputError, match=r"which is live; a new one needs another embedder"):
        run_reindex(with_broker(old), threading.Event())
    store.change(lambda now: now.add(generation_of(new), new, 1))
    store.change(lambda now: now.reclaiming(generation_of(new).name, 1))
    with pytest.raises(SettingsError, match="is being reclaimed; run `kvquilt gc` to its end"):
        run_reindex(with_broker(new), threading.Event())
