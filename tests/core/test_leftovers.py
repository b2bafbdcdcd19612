"""What kills leave in a store goes when a build starts and when it has succeeded, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from draftmill import leftovers
from draftmill.build_claims import myself
from draftmill.store.claims import Claim
from draftmill.store.local import LocalStore
from tests.core.builds import TRAIN, configuration, graph_of

DAY_S = 86400.0


def claim(run: str, pid_offset: int = 0) -> bytes:
    me = myself()
    return Claim("owner", replace(me, start=me.start + pid_offset), "host", run, 0.0).encode()


def test_journals_of_finished_jobs_and_claims_of_the_dead_go_at_the_start(tmp_path):
    graph, store = graph_of(configuration()), LocalStore(tmp_path)
    fp = graph.specs.fp
    journals = [f"journal/generate/{shard}-{fp['generate']}/00000000-ab.jsonl" for shard in TRAIN[:2]]
    kept = [journals[1], f"journal/generate/{TRAIN[0]}-otherspec/0.jsonl", "claims/extract/living.json", "index.txt"]
    gone = [journals[0], "claims/extract/dead.json", "claims/extract/broken.json"]
    for key in (*kept, *gone):
        store.put(key, claim("run", 0 if "living" in key else 1) if "broken" not in key else b"?")
    done = graph.outputs("generate", TRAIN[0])
    for key in done:
        store.put(key, b"")
    leftovers.at_start(store, replace(graph, present=frozenset(store.list())), DAY_S)
    assert sorted(store.list()) == sorted([*kept, *done])


def test_all_journals_and_claims_of_a_build_go_when_it_has_succeeded(tmp_path):
    graph, store = graph_of(configuration()), LocalStore(tmp_path)
    fp = graph.specs.fp
    kept = ["journal/generate/of-another-config/0.jsonl", "claims/train/other-run.json"]
    gone = [
        f"journal/generate/{TRAIN[3]}-{fp['generate']}/0.jsonl",
        f"journal/train/{fp['train']}-0/trainer.safetensors",
        "claims/train/this-run.json",
    ]
    for key in (*kept, *gone):
        store.put(key, claim("this" if "this-run" in key else "other"))
    leftovers.at_end(store, graph, "this", DAY_S)
    assert sorted(store.list()) == sorted(kept)
