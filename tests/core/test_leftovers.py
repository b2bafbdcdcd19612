"""What kills leave in a store goes when a build starts and when it has succeeded, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmill import leftovers
from draftmill.build_claims import myself
from draftmill.graph import ONCE
from draftmill.store.claims import Claim
from draftmill.store.local import LocalStore
from tests.core.builds import TRAIN, configuration, graph_of

DAY_S = 86400.0


def claim(run: str, pid_offset: int = 0) -> bytes:
    me = myself()
    return Claim("owner", replace(me, start=me.start + pid_offset), "host", run, 0.0).encode()


def test_journals_of_finished_jobs_and_claims_of_the_dead_go(tmp_path):
    graph, store = graph_of(configuration()), LocalStore(tmp_path)
    fp = graph.specs.fp
    journals = [f"journal/generate/{shard}-{fp['generate']}/00000000-ab.jsonl" for shard in TRAIN[:2]]
    kept = [
        *(journals[1], f"journal/generate/{TRAIN[0]}-otherspec/0.jsonl", "claims/extract/living.json", "index.txt"),
        *(f"journal/train/{fp['train']}-0/trainer.safetensors", "claims/train/other-run.json"),
    ]
    gone = [journals[0], "claims/extract/dead.json", "claims/extract/broken.json", "claims/train/this-run.json"]
    for key in (*kept, *gone):
        run = "this" if "this-run" in key else "other"
        store.put(key, b"?" if "broken" in key else claim(run, 1 if "dead" in key else 0))
    done = graph.outputs("generate", TRAIN[0])
    for key in done:
        store.put(key, b"")
    leftovers.at_end(store, replace(graph, present=frozenset(done)), DAY_S, "this", graph)
    assert sorted(store.list()) == sorted([*kept, *done])


@pytest.mark.parametrize("other_at_work", [False, True])
def test_states_of_trained_windows_go_at_a_start_unless_another_build_is_at_work(tmp_path, other_at_work):
    graph, store = graph_of(configuration(hidden={"policy": "window", "window_shards": 2})), LocalStore(tmp_path)
    trained = {*graph.outputs("train", "0"), *graph.outputs("pilot", ONCE)}
    states = [graph.hidden(shard) for shard in graph.windows[0]]
    for key in (*trained, *states):
        store.put(key, b"")
    if other_at_work:
        store.put("claims/extract/theirs.json", claim("other"))
    now = replace(graph, present=frozenset(store.list()))
    assert now.spent_states()
    leftovers.at_start(store, now, DAY_S, "this")
    assert bool(store.list("hidden/")) is other_at_work
    leftovers.at_end(store, replace(graph, present=frozenset(store.list())), DAY_S, "this", now)
    assert bool(store.list("hidden/")) is other_at_work
    if not other_at_work:
        return
    store.delete("claims/extract/theirs.json")
    leftovers.at_end(store, replace(graph, present=frozenset(store.list())), DAY_S, "this", now)
    assert store.list("hidden/"), "it may only be between two jobs"
    store.put("claims/extract/theirs.json", claim("other", 1))
    leftovers.at_end(store, replace(graph, present=frozenset(store.list())), DAY_S, "this", now)
    assert not store.list("hidden/"), "who seemed at work when the build started is known to be dead now"


def test_states_that_were_asked_for_in_a_build_stay_when_it_ends(tmp_path):
    graph, store = graph_of(configuration(hidden={"policy": "window", "window_shards": 2})), LocalStore(tmp_path)
    for key in (*graph.outputs("train", "0"), *graph.outputs("pilot", ONCE)):
        store.put(key, b"")
    planned = replace(graph, present=frozenset(store.list()))
    store.put(graph.hidden(graph.windows[0][0]), b"")
    leftovers.at_end(store, replace(graph, present=frozenset(store.list())), DAY_S, "this", planned)
    assert len(store.list("hidden/")) == 1
