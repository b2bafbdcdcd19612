"""`draftmill gc`: nothing that a given configuration reaches is ever removed, nor what is young or not ours."""

import os
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.catalog import identify
from draftmill.integrity import gc
from draftmill.integrity.reach import jobs, objects, reached
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import verify
from draftmill.prompts import history
from draftmill.workflow import graph_of
from tests.integrity.stores import Toy

DAY = 86400.0
OTHERS = {
    "seed": {"generate": {"seed": 1}},
    "limits": {"audit": {"max_spike": 0.99}},
    "taps": {"hidden": {"taps": [0, 1]}},
    "rate": {"train": {"learning_rate": 1e-3}},
    "longer": {"evaluate": {"max_new_tokens": 9}},
}


def found(toy, *graphs, before=None, **options):
    reader = Reader(toy.store)
    before = time.time() + DAY if before is None else before
    return gc.waste(toy.store, reader.listing, reached(graphs, toy.store), before=before, **options)


def other(toy, **changes):
    """The same project under other settings, built."""
    variant = Toy.open(toy.store.root.parent, **changes)
    variant.build()
    return variant


def test_one_configuration_reaches_all_that_it_built(toy):
    assert found(toy, toy.graph).keys == []


def test_what_only_another_configuration_reaches_goes(toy):
    before = set(toy.store.list())
    variant = other(toy, **OTHERS["rate"])
    new = set(toy.store.list()) - before
    waste = found(toy, toy.graph)
    assert set(waste.keys) == new
    assert set(waste.kinds) == {"drafter", "evaluation", "report", "record"}
    assert waste.bytes == sum(toy.store.list()[key].size for key in new)
    gc.remove(toy.store, waste)
    assert set(toy.store.list()) == before
    assert found(toy, variant.graph).keys != []


@pytest.fixture(scope="module")
def crowded(pristine, tmp_path_factory):
    """A project whose store holds what several configurations have built."""
    folder = tmp_path_factory.mktemp("crowded") / "project"
    shutil.copytree(pristine, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for changes in OTHERS.values():
            Toy.open(folder, **changes).build()
    return folder


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_that_a_given_configuration_reaches_is_removed(crowded, tmp_path_factory, monkeypatch, data):
    """Over stores of several configurations with holes, litter and foreign files in them."""
    folder = tmp_path_factory.mktemp("store") / "project"
    shutil.copytree(crowded, folder)
    monkeypatch.chdir(folder)
    names = data.draw(st.lists(st.sampled_from(["", *sorted(OTHERS)]), min_size=1, max_size=3, unique=True))
    toy = Toy.open(folder)
    for key in data.draw(st.lists(st.sampled_from(sorted(toy.store.list())), max_size=5)):
        toy.store.delete(key)
    foreign = data.draw(st.sets(st.sampled_from(["x", "drafter/x.txt", "prompts/notes", "quarantine/0001/x"])))
    for key in foreign:
        toy.store.put(key, b"x")
    graphs = [Toy.open(folder, **OTHERS.get(name, {})).graph for name in names]
    reach = {key for graph in graphs for key in objects(graph)}
    alive = {job for graph in graphs for job in jobs(graph)}
    before = toy.store.list()
    gc.remove(toy.store, found(toy, *graphs))
    gone = before.keys() - toy.store.list().keys()
    assert gone.isdisjoint(reach)
    assert gone.isdisjoint(foreign)
    assert all((identify(key).stage, identify(key).name) not in alive for key in gone)
    # What stays is what is reached, what accompanies it, and what is not ours.
    left = toy.store.list().keys() - reach - foreign
    assert all((identify(key).stage, identify(key).name) in alive for key in left)


@settings(max_examples=30, deadline=None)
@given(ages=st.lists(st.floats(0, 100), min_size=1, max_size=12), grace=st.floats(0, 100))
def test_nothing_younger_than_the_grace_period_goes(tmp_path_factory, ages, grace):
    from draftmill.store.local import LocalStore

    store, now = LocalStore(tmp_path_factory.mktemp("store")), 1e9
    names = {f"eval/{number:012x}.json": age for number, age in enumerate(ages)}
    for key, age in names.items():
        store.put(key, b"{}")
        os.utime(store.path(key), (now - age, now - age))
    waste = gc.waste(store, store.list(), (frozenset(), frozenset()), before=now - grace)
    assert set(waste.keys) == {key for key in names if store.list()[key].modified <= now - grace}
    assert waste.young == len(names) - len(waste.keys)


def test_work_that_goes_on_keeps_its_older_segments(toy):
    folder = layout.journal("generate", f"{'ab' * 6}-{'cd' * 6}")
    for number, age in enumerate((9.0, 0.0)):
        key = f"{folder}/{number:08d}.jsonl"
        toy.store.put(key, b"x")
        os.utime(toy.path(key), (time.time() - age * DAY,) * 2)
    assert found(toy, toy.graph, before=time.time() - DAY).keys == []
    assert len(found(toy, toy.graph).keys) == 2


def test_journals_of_finished_jobs_go_and_those_of_unfinished_ones_stay(toy):
    fp, (one, two) = toy.graph.specs.fp["generate"], toy.graph.train[:2]
    toy.store.delete(toy.graph.completions(two))
    spent, needed = (f"{layout.journal('generate', f'{shard}-{fp}')}/0.jsonl" for shard in (one, two))
    for key in (spent, needed):
        toy.store.put(key, b"x")
    assert found(toy, graph_of(toy.config, toy.store)).keys == [spent]


def test_what_a_killed_self_test_left_goes_when_it_is_old(toy):
    probe = layout.probe()
    toy.store.put(probe, b"x")
    assert found(toy, toy.graph, before=time.time() - DAY).keys == []
    assert found(toy, toy.graph).keys == [probe]


def test_quarantine_and_the_index_stay_unless_asked(toy):
    toy.store.put("quarantine/0001/eval/x.json", b"x")
    assert found(toy, toy.graph).keys == []
    assert found(toy, toy.graph, quarantine=True).keys == ["quarantine/0001/eval/x.json"]
    nothing = found(toy)
    assert layout.INDEX not in nothing.keys
    assert toy.graph.prompts(toy.graph.train[0]) in nothing.keys


def test_old_rows_that_a_shard_to_come_would_take_over_stay(toy):
    shard, old = toy.graph.train[0], "ab" * 6
    fp = toy.graph.specs.fp["generate"]
    toy.store.put(layout.KIN, history.canonical_json({shard: {old: [[0, 3]]}}).encode())
    for key in (layout.completions(old, fp), layout.completions(old, "cd" * 6)):
        toy.store.put(key, b"x")
    assert set(found(toy, toy.graph).keys) == {layout.completions(old, fp), layout.completions(old, "cd" * 6)}
    toy.store.delete(toy.graph.completions(shard))
    graph = graph_of(toy.config, toy.store)
    assert found(toy, graph).keys == [layout.completions(old, "cd" * 6)]


def test_records_of_reached_jobs_stay_without_their_objects(toy):
    """Temporary states are gone, and how long they took is still worth knowing."""
    toy.store.delete(toy.graph.hidden(toy.graph.train[0]))
    assert found(toy, graph_of(toy.config, toy.store)).keys == []


def test_a_swept_store_is_sound(toy):
    other(toy, **OTHERS["seed"])
    gc.remove(toy.store, found(toy, toy.graph))
    assert verify(Reader(toy.store)).findings == []


def test_a_record_goes_after_its_objects():
    """A kill in between leaves objects with their records, never without."""
    order = []

    class Store:
        def delete(self, key):
            order.append(key)

    kinds = {"record": {"records/a": 1}, "drafter": {"drafter/b": 1}, "prompts": {"prompts/c": 1}}
    gc.remove(Store(), gc.Waste(kinds))
    assert order[-1] == "records/a"
