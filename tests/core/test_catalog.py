"""Names of jobs: put together and taken apart by one pair of functions, for every stage and every kind of key."""

import pytest

from draftmill import layout
from draftmill.catalog import identify, job_name, outputs, parts
from draftmill.plan.causes import name_of
from draftmill.plan.jobs import all_jobs
from draftmill.specs import INPUTS, SPEC_VERSIONS
from tests.core.builds import configuration, graph_of

FP, SHARD = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("stage", "part", "name"),
    [
        ("generate", SHARD, f"{SHARD}-{FP}"),
        ("audit", SHARD, f"{SHARD}-{FP}"),
        ("extract", SHARD, f"{SHARD}-{FP}"),
        ("train", "0", f"{FP}-0"),
        ("train", "12", f"{FP}-12"),
        ("pilot", "", FP),
        ("evaluate", "", FP),
    ],
)
def test_a_name_is_its_parts(stage, part, name):
    assert job_name(stage, part, FP) == name
    assert parts(stage, name) == (part, FP)


def test_every_key_of_a_job_tells_its_parts():
    graph = graph_of(configuration())
    for job in all_jobs(graph):
        stage, name = job[0], name_of(graph, job)
        part, fp = parts(stage, name)
        beside = [layout.record(stage, name), layout.progress(stage, name), layout.claim(stage, name)]
        beside.append(f"{layout.journal(stage, name)}/0.jsonl")
        for key in [*(key for keys in outputs(stage, name) for key in keys), *graph.outputs(*job), *beside]:
            entry = identify(key)
            assert (entry.job, entry.fp) == ((stage, name), fp), key
            assert entry.fp == graph.specs.fp[stage]
            assert entry.shard == ("" if stage == "train" else part), key


def test_the_inputs_of_every_stage_are_declared_before_it():
    assert INPUTS.keys() == SPEC_VERSIONS.keys()
    seen = set()
    for stage, above in INPUTS.items():
        assert seen.issuperset(above)
        seen.add(stage)
