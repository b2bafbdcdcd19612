"""`draftmill adopt`: an upgrade throws away only what the declared rules do not vouch for, down the whole chain."""

import itertools
from dataclasses import replace

import pytest

from draftmill import adoption, layout, specs
from draftmill.adoption import REMADE, STEPS, NoStepError, Step, steps, upgrade
from draftmill.canonical import fingerprint
from draftmill.catalog import OBJECTS, identify
from draftmill.integrity import gc
from draftmill.integrity.adopt import Adoption
from draftmill.integrity.findings import Unsound
from draftmill.integrity.reach import reached
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.records import read_record
from draftmill.schemas import COMPLETIONS, read_provenance, read_rows
from draftmill.specs import SPEC_VERSIONS
from tests.integrity.damage import edit_json, edit_rows, found, rerecord
from tests.integrity.stores import Toy

DAY = 86400.0


@pytest.fixture
def versions(monkeypatch):
    """Set the versions of stages, as another release of draftmill has them."""

    def put(**changed):
        now = {**SPEC_VERSIONS, **changed}
        monkeypatch.setattr(specs, "SPEC_VERSIONS", now)
        return now

    return put


def reopened(toy: Toy) -> Toy:
    """The same project in the release that runs now."""
    return Toy.open(toy.store.root.parent)


def declare(monkeypatch, stage, version, objection=lambda old: "", spec=lambda spec: spec):
    monkeypatch.setattr(adoption, "STEPS", {**adoption.STEPS, (stage, version): Step("A test.", objection, spec)})


def adopted(toy: Toy, now, **options) -> list[tuple[str, str]]:
    """Take over all that stands: stages and shards, windows or nothing."""
    adoption_ = Adoption(Reader(toy.store), now)
    plan = adoption_.plan([toy.graph])
    for job in plan.jobs:
        adoption_.take_over(job, **options)
    return [(job.stage, job.shard) for job in plan.jobs]


def wanted(toy: Toy) -> set[str]:
    """Stages that still have a job to run."""
    graph = reopened(toy).graph
    names = [(stage, shard) for stage in ("generate", "audit", "extract") for shard in graph.shards]
    names += [(stage, "0") for stage in ("pilot", "audit_set", "train", "evaluate", "report")]
    return {stage for stage, name in names if graph.wanted(stage, name)}


def objects(toy: Toy) -> set[str]:
    return {key for key in toy.store.list() if (entry := identify(key)) and entry.kind in OBJECTS}


# Rules ----------------------------------------------------------------------------------------------------------------


def test_every_version_that_was_ever_raised_has_its_rule():
    """Who raises a version says what of the old one stands; pages for people are made anew."""
    needed = {(stage, old) for stage, now in SPEC_VERSIONS.items() if stage not in REMADE for old in range(1, now)}
    assert needed == set(STEPS), "declare the step in draftmill/adoption.py"


def test_an_undeclared_step_and_a_newer_version_are_refused():
    with pytest.raises(NoStepError, match="no rule says what of version 0 of audit"):
        steps("audit", 0)
    with pytest.raises(NoStepError, match="newer than this draftmill"):
        steps("audit", 99)


def test_an_upgrade_changes_the_version_alone_unless_the_step_says_more():
    assert upgrade("audit", {"version": 1, "limits": {"a": 1}}) == {"version": 2, "limits": {"a": 1}}


# A store of the release before: audits of version 1 --------------------------------------------------------------------


@pytest.fixture
def aged(toy, versions):
    """The store with audits as version 1 would have left them."""
    versions(audit=1, audit_set=1)
    old = reopened(toy)
    old.build()
    versions()
    reader = Reader(toy.store)
    waste = gc.waste(toy.store, reader.listing, reached([old.graph], toy.store), before=2e10)
    gc.remove(toy.store, waste)
    return reopened(toy)


def test_a_store_of_before_is_sound_and_its_audits_are_wanted_again(aged):
    assert verify(Reader(aged.store), Options(deep=True)).findings == []
    assert wanted(aged) == {"audit", "audit_set"}


def test_a_dry_look_changes_nothing(aged):
    before = aged.store.list()
    plan = Adoption(Reader(aged.store)).plan([aged.graph])
    assert [(job.stage, job.shard) for job in plan.jobs] == [("audit", shard) for shard in aged.graph.shards]
    assert plan.refused == {}
    assert aged.store.list() == before


def test_audits_are_taken_over_and_equal_those_that_would_be_made(aged, pristine):
    adopted(aged, SPEC_VERSIONS)
    assert wanted(aged) == {"audit_set"}
    assert verify(Reader(aged.store), Options(deep=True)).findings == []
    for shard in aged.graph.shards:
        now = Reader(aged.store).provenance(aged.graph.audit(shard))
        assert len(now.pop("adopted_from")) == 1
        fresh = Toy.open(pristine)
        assert now == Reader(fresh.store).provenance(fresh.graph.audit(shard))
        page = aged.path(aged.graph.audit_page(shard)).read_text()
        assert "adopted_from" in page


def test_what_is_taken_over_twice_is_there_once(aged):
    assert len(adopted(aged, SPEC_VERSIONS)) == len(aged.graph.shards)
    before = aged.store.list()
    assert adopted(reopened(aged), SPEC_VERSIONS) == []
    assert aged.store.list() == before


def test_an_audit_of_imported_answers_without_end_is_made_again(aged):
    shard = aged.graph.train[1]
    key = aged.graph.completions(shard)
    edit_rows(
        aged.path(key),
        COMPLETIONS,
        lambda rows: [{**rows[0], "origin": "imported", "finish_reason": "length"}, *rows[1:]],
    )
    plan = Adoption(Reader(aged.store)).plan([aged.graph])
    assert [job.shard for job in plan.jobs] == [one for one in aged.graph.shards if one != shard]
    assert plan.refused == {"audit: 1 imported answers without an end token are counted otherwise now": 1}


def test_an_audit_whose_completions_are_gone_is_made_again(aged):
    aged.store.delete(aged.graph.completions(aged.graph.train[0]))
    plan = Adoption(Reader(aged.store)).plan([aged.graph])
    assert aged.graph.train[0] not in {job.shard for job in plan.jobs}
    assert [why for why in plan.refused if "its completions are gone" in why]


def test_a_sweep_before_the_adoption_takes_nothing_that_it_needs(aged):
    """The command's own order: what adopt would still take over stays."""
    reader = Reader(aged.store)
    pending = {key for job in Adoption(reader).plan([aged.graph]).jobs for key in job.keys}
    keys, jobs = reached([aged.graph], aged.store)
    assert pending
    assert pending.isdisjoint(gc.waste(aged.store, reader.listing, (keys | pending, jobs), before=2e10).keys)


# A release to come: the version of generate rises ----------------------------------------------------------------------


def test_the_whole_chain_is_taken_over(toy, versions, monkeypatch):
    before = {key: toy.store.get(key) for key in objects(toy)}
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1)
    later = reopened(toy)
    assert wanted(later) == {"generate", "audit", "extract", "pilot", "audit_set", "train", "evaluate", "report"}
    done = adopted(later, now)
    shards = later.graph.shards
    every = [(stage, shard) for stage in ("generate", "audit", "extract") for shard in shards]
    assert done == [*every, ("pilot", ""), ("train", "0"), ("evaluate", "")]
    assert wanted(later) == {"audit_set", "report"}
    assert verify(Reader(toy.store), Options(deep=True)).findings == []
    assert {key: toy.store.get(key) for key in before} == before


def test_contents_are_the_same_under_the_new_name(toy, versions, monkeypatch):
    old, shard = toy.graph, toy.graph.train[0]
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1)
    later = reopened(toy)
    adopted(later, now)
    new = later.graph
    rows = [read_rows(toy.path(graph.completions(shard)), COMPLETIONS) for graph in (old, new)]
    assert rows[0] == rows[1]
    inside = [read_provenance(toy.path(graph.completions(shard))) for graph in (old, new)]
    assert inside[1]["adopted_from"] == [old.specs.fp["generate"]]
    assert inside[1]["spec"] == {**inside[0]["spec"], "version": 2}
    assert inside[1]["versions"] == inside[0]["versions"]
    weights = [toy.path(graph.drafter(0, "model.safetensors")).read_bytes() for graph in (old, new)]
    assert weights[0] == weights[1]
    assert Reader(toy.store).provenance(new.evaluation())["inputs"] == {"drafter": new.drafter(0, "model.safetensors")}


def test_a_relabelled_object_is_what_its_stage_writes(toy, versions, monkeypatch):
    """Byte for byte, once the list of earlier fingerprints is left out: so builds and relabelled stores mix."""
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1)
    later = reopened(toy)
    adoption_ = Adoption(Reader(later.store), now)
    original = Adoption.new_provenance

    def without(self, job):
        return {k: v for k, v in original(self, job).items() if k != "adopted_from"}

    monkeypatch.setattr(Adoption, "new_provenance", without)
    for job in adoption_.plan([later.graph]).jobs:
        adoption_.take_over(job)
    taken = {key: later.store.get(key) for key in objects(reopened(later))}
    for key in [*taken]:
        if identify(key).fp in set(later.graph.specs.fp.values()):
            later.store.delete(key)
        else:
            del taken[key]
    fresh = reopened(later)
    fresh.build()
    assert {key: fresh.store.get(key) for key in taken} == taken


def test_what_stands_on_refused_rows_is_refused_too(toy, versions, monkeypatch):
    """One shard's completions do not stand: its audit and states go with it, and so does the drafter behind them."""
    bad = toy.graph.train[1]
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1, lambda old: "a test" if old.provenance["inputs"]["prompts"] == bad else "")
    later = reopened(toy)
    done = adopted(later, now)
    assert {shard for _, shard in done} == {*later.graph.shards, ""} - {bad}
    assert {stage for stage, _ in done} == {"generate", "audit", "extract", "pilot"}
    assert wanted(later) == {"generate", "audit", "extract", "audit_set", "train", "evaluate", "report"}
    later.build()
    assert found(toy.store, deep=True) == set()


def test_a_held_out_shard_that_does_not_stand_takes_the_drafter_with_it(toy, versions, monkeypatch):
    bad = toy.graph.held_out[0]
    now = versions(extract=2)
    declare(monkeypatch, "extract", 1, lambda old: "a test" if bad in old.provenance["inputs"]["completions"] else "")
    done = adopted(reopened(toy), now)
    assert ("extract", toy.graph.train[0]) in done
    assert {"train", "evaluate"}.isdisjoint(stage for stage, _ in done)


def test_temporary_states_that_are_gone_do_not_keep_a_drafter_from_being_taken_over(toy, versions, monkeypatch):
    for shard in toy.graph.train:
        toy.store.delete(toy.graph.hidden(shard))
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1)
    assert ("train", "0") in adopted(reopened(toy), now)


def test_a_spec_may_change_with_its_version(toy, versions, monkeypatch):
    """A key that the new release has and the old one lacked, with the value that means the same."""
    now = versions(evaluate=2)
    real = specs.resolve

    def resolve(*arguments):
        resolved = real(*arguments)
        spec = {**resolved.spec["evaluate"], "strict": False}
        fp = fingerprint(["evaluate", spec, [resolved.fp["train"]]])
        return replace(resolved, spec={**resolved.spec, "evaluate": spec}, fp={**resolved.fp, "evaluate": fp})

    monkeypatch.setattr("draftmill.workflow.resolve", resolve)
    declare(monkeypatch, "evaluate", 1, spec=lambda spec: {**spec, "strict": False})
    later = reopened(toy)
    assert wanted(later) == {"evaluate", "report"}
    assert adopted(later, now) == [("evaluate", "")]
    assert wanted(later) == {"report"}
    assert found(toy.store) == set()


def test_without_a_rule_nothing_stands_and_the_reason_is_said(toy, versions):
    now = versions(generate=2)
    plan = Adoption(Reader(toy.store), now).plan([reopened(toy).graph])
    assert plan.jobs == []
    assert "generate: no rule says what of version 1 of generate still stands" in plan.refused


def test_other_settings_are_no_older_version(toy):
    other = Toy.open(toy.store.root.parent, generate={"seed": 7})
    plan = Adoption(Reader(toy.store)).plan([other.graph])
    assert (plan.jobs, plan.refused) == ([], {})


def test_damage_gets_no_new_name(aged):
    shard = aged.graph.train[0]
    job = next(job for job in Adoption(Reader(aged.store)).plan([aged.graph]).jobs if job.shard == shard)
    old = next(key for key in job.keys if key.endswith(".html"))
    aged.path(old).write_text("changed </html>")
    with pytest.raises(Unsound, match="digest"):
        Adoption(Reader(aged.store)).take_over(job)
    assert set(job.keys.values()).isdisjoint(aged.store.list())
    rerecord(aged.store, old)
    Adoption(Reader(aged.store)).take_over(job)


def test_records_move_with_the_objects_and_keep_what_the_work_took(toy, versions, monkeypatch):
    old = read_record(toy.store, layout.record("train", f"{toy.graph.specs.fp['train']}-0"))
    now = versions(generate=2)
    declare(monkeypatch, "generate", 1)
    later = reopened(toy)
    adopted(later, now, remove_old=True)
    new = read_record(toy.store, layout.record("train", f"{later.graph.specs.fp['train']}-0"))
    assert (new.started, new.finished, new.run) == (old.started, old.finished, old.run)
    assert set(new.outputs) == {later.graph.drafter(0, name) for name in layout.DRAFTER_FILES}
    assert set(new.inputs) == {later.graph.hidden(shard) for shard in later.graph.shards}
    left = {identify(key).fp for key in objects(toy) if identify(key).stage in ("generate", "extract", "train")}
    assert left == {later.graph.specs.fp[stage] for stage in ("generate", "extract", "train")}
    assert found(toy.store, deep=True) == set()


def test_what_only_accompanies_a_job_says_nothing_of_its_objects(toy):
    """A claim or journal that a kill left is no object of its job."""
    shard = toy.graph.train[0]
    name = f"{shard}-{toy.graph.specs.fp['generate']}"
    expected = Adoption(Reader(toy.store)).provenance("generate", name)
    toy.store.put(layout.claim("generate", name), b"{}")
    toy.store.put(f"{layout.journal('generate', name)}/0.jsonl", b"{}")
    toy.store.put(layout.progress("generate", name), b"{}")
    assert Adoption(Reader(toy.store)).provenance("generate", name) == expected != {}


def test_one_damaged_object_keeps_no_other_from_being_taken_over(aged):
    whole = len(Adoption(Reader(aged.store)).plan([aged.graph]).jobs)
    key = min(key for key in aged.store.list("audits/") if key.endswith(".json"))
    before = aged.path(key).read_bytes()
    for part, value in itertools.product(
        ("spec", "inputs", "fingerprint"), (None, 5, "x", [1], {}, {"version": "x"}, {"version": float("inf")})
    ):
        edit_json(aged.path(key), lambda found, new={part: value}: found["provenance"].update(new))
        assert len(Adoption(Reader(aged.store)).plan([aged.graph]).jobs) in (whole, whole - 1)
        aged.path(key).write_bytes(before)
