"""The record of generations: one atomic switch, whoever else writes, and leases that end by themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas.errors import BlobError, InputError, SettingsError
from schemas.generations import Generations, deciding, differences
from schemas.settings import PrefillSettings, load_settings
from stores.blobs import open_blobs
from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from stores.generations import GenerationStore
from tests.stores.generations_world import LEASE_S, NEW, OLD, Deployment, settings_of


@pytest.fixture
def deployment():
    deployment = Deployment()
    yield deployment
    deployment.close()


def test_the_first_generation_that_is_used_is_live_at_once(deployment):
    assert deployment.store.read() == Generations()
    deployment.first_use()
    assert deployment.states() == {"old": "live"}
    deployment.first_use()
    assert deployment.store.read().sequence == 1, "using it again writes nothing"


def test_other_settings_are_refused_with_what_differs_instead_of_working_on_an_empty_generation(deployment):
    """Bug: after a changed setting the pipelines fed an empty generation, and the one that was served stood still."""
    deployment.first_use()
    with pytest.raises(SettingsError, match=r"chunk_max_tokens 16 there, 32 here\). To build it .* `kvquilt reindex`"):
        deployment.store.claim(NEW, settings_of(NEW), "index")
    assert deployment.store.leases.held(NEW.name) == []
    deployment.add()
    deployment.store.claim(NEW, settings_of(NEW), "index").close()


def test_promote_and_rollback_change_places_in_one_step_and_say_since_when(deployment):
    deployment.first_use()
    deployment.add()
    assert deployment.states() == {"old": "live", "new": "building"}
    deployment.clock.advance(10)
    promoted = deployment.promote()
    assert (promoted.live.name, promoted.previous) == (NEW.name, OLD.name)
    assert {one.since_ms for one in promoted.known} == {deployment.clock.now_ms()}
    assert promoted.to_roll_back_to().name == OLD.name
    back = deployment.promote(OLD)
    assert deployment.states() == {"old": "live", "new": "standby"}
    assert back.to_roll_back_to().name == NEW.name, "and forward again"
    assert deployment.promote(OLD) == back, "promoting what is live changes nothing"


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("target", [NEW, OLD], ids=["promote", "rollback"])
def test_a_crash_in_a_switch_leaves_the_one_or_the_other_and_never_none(deployment, target, after):
    """Bug: Qdrant's aliases, switched by delete and create, can leave none (infrastructure, section 3)."""
    deployment.first_use()
    deployment.add()
    if target is OLD:
        deployment.promote(NEW)
    before = deployment.store.read()
    blobs = with_faults(deployment.blobs, CrashPoint("put_new", after=after))
    with pytest.raises(SimulatedCrash):
        GenerationStore(blobs, deployment.clock).change(lambda now: now.promote(target.name, 1))
    live = deployment.store.read().live
    assert live.name == (target.name if after else before.live.name)
    deployment.promote(target)
    assert deployment.store.read().live.name == target.name


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_of_writers_at_the_same_time_none_loses_another_ones_change(kind, tmp_path):
    """Only create-only puts are atomic in every object store: the number of the record is the compare-and-set."""
    url = "memory://race" if kind == "memory" else tmp_path.as_uri()
    store = GenerationStore(open_blobs(url))
    store.claim(OLD, settings_of(OLD), "index").close()
    others = [OLD.model_copy(update={"chunk_max_tokens": 100 + n}) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: store.change(lambda now: now.add(one, settings_of(one), 1)), others))
    record = store.read()
    assert {one.name for one in record.known} == {OLD.name, *(one.name for one in others)}
    assert record.sequence == 9
    assert len({one.group for one in record.known}) == 9, "each reads the topics for itself"


def test_a_generation_that_is_made_again_reads_the_topics_from_the_beginning(deployment):
    """Bug: it would have gone on at the offsets that it had when it was reclaimed, over empty collections."""
    deployment.first_use()
    first = deployment.add().get(NEW.name)
    deployment.store.change(lambda now: now.reclaiming(NEW.name, 1))
    with pytest.raises(SettingsError, match="is being reclaimed"):
        deployment.add()
    deployment.store.change(lambda now: now.without(NEW.name))
    again = deployment.add().get(NEW.name)
    assert again.group != first.group
    assert again.bind(settings_of(NEW)).kafka.group_of("index") == f"kvquilt.{again.group}.index"
    old = deployment.store.read().get(OLD.name)
    assert old.bind(settings_of(OLD)).kafka.group_of("index") == "kvquilt.index", "the first one has the plain groups"


def test_what_cannot_be_done_is_refused_and_nothing_is_written(deployment):
    deployment.first_use()
    deployment.add()
    before = deployment.store.read()
    for change, message in [
        (lambda now: now.promote("ffff", 1), "'ffff' names 0 generations; there are"),
        (lambda now: now.promote("", 1), "'' names 0 generations"),
        (lambda now: now.reclaiming(OLD.name, 1), "is live and is not reclaimed"),
        (lambda now: now.reclaiming(NEW.name, 1).promote(NEW.name, 1), "is being reclaimed and cannot become live"),
    ]:
        with pytest.raises(InputError, match=message):
            deployment.store.change(change)
    with pytest.raises(InputError, match="nothing to roll back to: nothing was promoted"):
        before.to_roll_back_to()
    assert deployment.store.read() == before
    assert before.named(NEW.name[:4]).name == NEW.name


def test_a_damaged_record_is_an_error_that_names_it(deployment):
    deployment.blobs.put_new("generations/record/000000000001.json", b"{")
    with pytest.raises(BlobError, match=r"generations/record/000000000001\.json: not a record of generations"):
        deployment.store.read()


def test_a_lease_holds_while_it_is_renewed_and_runs_out_by_itself(deployment):
    claim = deployment.store.claim(OLD, settings_of(OLD), "prefill")
    assert [lease.role for lease in deployment.store.leases.held(OLD.name)] == ["prefill"]
    deployment.clock.advance(LEASE_S + 1)  # its holder was killed
    assert deployment.store.leases.held(OLD.name) == []
    claim.close()
    assert deployment.blobs.list("generations/leases") == []


def test_renewing_leaves_one_object_a_holder(deployment):
    leases = deployment.store.leases
    for _ in range(3):
        leases.renew(OLD.name, "serve", "here-1-1")
        deployment.clock.advance(20)
    leases.renew(OLD.name, "serve", "there-1-1")
    assert [lease.holder for lease in leases.held(OLD.name)] == ["here-1-1", "there-1-1"]
    leases.release(OLD.name, "serve", "here-1-1")
    assert [lease.holder for lease in leases.held(OLD.name)] == ["there-1-1"]


def test_settings_of_a_generation_are_put_into_those_of_another_process(tmp_path):
    """A process keeps its own stores, ports and devices, and works for the generation that it is told."""
    company = tmp_path / "company.txt"
    made = load_settings(
        {"model": {"name": "x", "device": "cuda"}, "chunker": {"max_tokens": 99}, "prompt": {"system": "Say."}}
    )
    made = made.model_copy(update={"prefill": PrefillSettings(variant="company", company=company)})
    entry = Generations.from_bytes(Generations().add(NEW, made, 1).to_bytes()).known[0]
    mine = load_settings({"model": {"device": "cpu"}, "serve": {"port": 1}})
    adapted = entry.adapt(mine)
    assert (adapted.model.name, adapted.model.device, adapted.serve.port) == ("x", "cpu", 1)
    assert (adapted.chunker.max_tokens, adapted.prompt.system) == (99, "Say.")
    assert adapted.prefill.company == company.resolve()
    assert deciding(adapted) == deciding(made)
    assert differences(OLD, OLD) == "nothing"
