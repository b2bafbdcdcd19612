"""Damaged objects are moved and made again, they alone: consumers go only if a record shows the damage in them."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.catalog import OBJECTS, identify
from draftmill.graph import ONCE
from draftmill.integrity.quarantine import quarantine
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.records import read_record, write_record
from draftmill.workflow import graph_of
from tests.integrity.damage import flip, found
from tests.integrity.stores import Toy


def clean_up(toy: Toy, *, deep: bool = True) -> list[str]:
    """Verify and quarantine: the keys that were moved."""
    reader = Reader(toy.store)
    moved = quarantine(reader, verify(reader, Options(deep=deep)).findings)
    return [] if moved is None else moved.keys


def planned(toy: Toy) -> list[tuple[str, str]]:
    """Jobs that a build would start."""
    graph = graph_of(toy.config, toy.store)
    jobs = [(stage, shard) for shard in graph.shards for stage in ("generate", "audit", "extract")]
    jobs += [(stage, ONCE) for stage in ("pilot", "audit_set", "evaluate", "report")] + [("train", "0")]
    return sorted(job for job in jobs if graph.wanted(*job))


def test_a_sound_store_is_left_as_it_is(toy):
    before = toy.store.list()
    assert clean_up(toy) == []
    assert toy.store.list() == before


def rebuilt(toy: Toy) -> dict[str, bytes]:
    toy.graph = graph_of(toy.config, toy.store)
    toy.build()
    keys = [key for key in toy.store.list() if (entry := identify(key)) and entry.kind in OBJECTS]
    return {key: toy.store.get(key) for key in keys}


SPOILT = {
    "completions": lambda graph: (graph.completions(graph.train[1]), ("generate", graph.train[1])),
    "rejected": lambda graph: (graph.rejected(graph.train[1]), ("generate", graph.train[1])),
    "audit": lambda graph: (graph.audit(graph.train[1]), ("audit", graph.train[1])),
    "hidden": lambda graph: (graph.hidden(graph.held_out[0]), ("extract", graph.held_out[0])),
    "drafter": lambda graph: (graph.drafter(0, "model.safetensors"), ("train", "0")),
    "evaluation": lambda graph: (graph.evaluation(), ("evaluate", ONCE)),
    "pilot": lambda graph: (graph.pilot(), ("pilot", ONCE)),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_damaged_object_is_moved_whole_and_its_job_alone_is_planned_again(toy, kind):
    whole = rebuilt(toy)
    key, job = SPOILT[kind](toy.graph)
    flip(toy.path(key), 11)
    spoilt = toy.store.get(key)
    assert clean_up(toy) == [key]
    assert toy.store.get(f"quarantine/0001/{key}") == spoilt
    assert planned(toy) == [job]
    assert rebuilt(toy) == whole
    assert found(toy.store, deep=True) == set()


def test_what_was_found_stands_beside_what_was_moved(toy):
    key = toy.graph.pilot()
    entry = identify(key)
    flip(toy.path(key), 3)
    clean_up(toy)
    about = json.loads(toy.store.get("quarantine/0001/findings.json"))
    assert [(one["key"], one["what"]) for one in about["findings"]] == [(key, "digest")]
    assert set(about["digests"]) == {key}
    assert read_record(toy.store, f"quarantine/0001/{layout.record(entry.stage, entry.name)}") is not None
    assert layout.record(entry.stage, entry.name) not in toy.store.list()


def test_every_call_has_a_folder_of_its_own(toy):
    for number, shard in enumerate(toy.graph.train[:2], 1):
        flip(toy.path(toy.graph.completions(shard)), 9)
        clean_up(toy)
        assert f"quarantine/{number:04d}/{toy.graph.completions(shard)}" in toy.store.list("quarantine/")


# Consumers ------------------------------------------------------------------------------------------------------------


def reads(toy: Toy, stage: str, name: str, key: str, digest: str | None) -> None:
    """Let a job's record say that it read these bytes of an object."""
    record = read_record(toy.store, layout.record(stage, name))
    read = record.inputs[key].model_copy(update={"sha256": digest})
    write_record(toy.store, record.model_copy(update={"inputs": {**record.inputs, key: read}}))


def test_what_was_made_from_the_damaged_bytes_goes_too_and_what_was_made_from_that(toy):
    graph, shard = toy.graph, toy.graph.train[0]
    key = graph.completions(shard)
    flip(toy.path(key), 40)
    reads(toy, "extract", f"{shard}-{graph.specs.fp['extract']}", key, Reader(toy.store).digest(key))
    moved = set(clean_up(toy))
    drafter = {graph.drafter(0, name) for name in layout.DRAFTER_FILES}
    assert moved == {key, graph.hidden(shard), *drafter, graph.evaluation(), graph.report(), graph.pilot()}
    rebuilt(toy)
    assert found(toy.store, deep=True) == set()


def test_a_consumer_of_bytes_that_were_quarantined_earlier_is_found_later(toy):
    """The build went on between the damage and its removal on another machine."""
    graph, shard = toy.graph, toy.graph.train[0]
    key, name = graph.completions(shard), f"{shard}-{graph.specs.fp['audit']}"
    flip(toy.path(key), 40)
    bad = Reader(toy.store).digest(key)
    assert clean_up(toy) == [key]
    rebuilt(toy)
    reads(toy, "audit", name, key, bad)
    assert (graph.audit(shard), "consumer") in found(toy.store)
    assert (graph.hidden(shard), "consumer") not in found(toy.store)


def test_a_consumer_of_which_nothing_is_known_stays_and_is_named(toy):
    graph, shard = toy.graph, toy.graph.train[0]
    key = graph.hidden(shard)
    reads(toy, "train", f"{graph.specs.fp['train']}-0", key, None)
    flip(toy.path(key), 40)
    model = graph.drafter(0, "model.safetensors")
    assert (model, "input unproven") in found(toy.store, deep=True)
    assert clean_up(toy) == [key]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_the_store_is_sound_and_the_same_after_one_build(toy, data):
    whole = rebuilt(toy)
    for key in data.draw(st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=4, unique=True)):
        if key.startswith("prompts/") or "/failed/" in key:
            continue
        size = len(whole[key])
        if data.draw(st.booleans()):
            toy.path(key).write_bytes(whole[key][: data.draw(st.integers(0, size - 1))])
        else:
            flip(toy.path(key), data.draw(st.integers(0, size - 1)))
    clean_up(toy)
    assert rebuilt(toy) == whole
    assert found(toy.store, deep=True) == set()
