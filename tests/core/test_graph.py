"""The graph: edges of each job, nothing for a job whose outputs are there, and windows that wait for each other."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.graph import DRAFTER_FILES, ONCE, Graph
from tests.core.builds import HELD_OUT, SIZES, TRAIN, configuration, graph_of

A, B, C, D, E = TRAIN
(H,) = HELD_OUT
JOBS = [
    *[(stage, shard) for stage in ("generate", "audit", "extract") for shard in (*TRAIN, H)],
    *[(stage, ONCE) for stage in ("audit_set", "pilot", "train", "evaluate", "report")],
]


def window_graph(size: int = 2, lead: int = 0, present: frozenset[str] = frozenset(), pilot: int = 0) -> Graph:
    hidden = {"policy": "window", "window_shards": size, "window_lead": lead}
    return graph_of(configuration(hidden=hidden, pilot=pilot), present)


def with_outputs(graph: Graph, *jobs: tuple[str, str]) -> Graph:
    made = frozenset(key for job in jobs for key in graph.outputs(*job))
    return Graph(graph.config, graph.index, graph.specs, graph.present | made)


def edges(graph: Graph, stage: str, name: str) -> list[str]:
    return [key for keys in graph.inputs(stage, name).values() for key in keys]


def makers(graph: Graph) -> dict[str, tuple[str, str]]:
    jobs = [job for job in JOBS if job[0] != "train"] + [("train", str(n)) for n in range(len(graph.windows))]
    return {key: job for job in jobs for key in graph.outputs(*job)}


def reachable(graph: Graph) -> set[tuple[str, str]]:
    """Jobs that a build of the results runs, found as Snakemake finds them."""
    made, found = makers(graph), set()
    left = [made[key] for key in graph.results() if key not in graph.present]
    while left:
        job = left.pop()
        if job not in found:
            found.add(job)
            left += [made[key] for key in edges(graph, *job) if key in made and key not in graph.present]
    return found


def test_an_empty_store_needs_every_job_and_a_full_one_none():
    graph = graph_of(configuration())
    assert reachable(graph) == set(JOBS)
    full = with_outputs(graph, *JOBS)
    assert reachable(full) == set()
    assert all(full.inputs(*job) == {} for job in JOBS)
    assert not any(full.wanted(*job) for job in JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(job)[:16])
def test_a_deleted_output_is_made_again_alone(job):
    full = with_outputs(graph_of(configuration()), *JOBS)
    for key in full.outputs(*job):
        left = Graph(full.config, full.index, full.specs, full.present - {key})
        assert left.wanted(*job)
        assert reachable(left) == {job}


def test_parts_are_what_is_there_of_jobs_that_have_not_made_all():
    graph = graph_of(configuration())
    whole = [*graph.outputs("generate", A), *graph.outputs("extract", A), *graph.outputs("audit", A)]
    parts = [graph.completions(B), graph.audit_page(B), graph.drafter(0, "model.safetensors")]
    seen = Graph(graph.config, graph.index, graph.specs, frozenset([*whole, *parts, "notes.txt"]))
    assert seen.parts() == parts


def test_states_are_temporary_under_windows_and_held_out_ones_never():
    assert graph_of(configuration()).temporary_states() == []
    graph = window_graph()
    assert graph.temporary_states() == [graph.train_hidden(shard) for shard in TRAIN]


def test_what_each_job_reads_and_waits_for():
    graph = graph_of(configuration(pilot=1))
    drafted = [graph.drafter(0, name) for name in DRAFTER_FILES]
    assert graph.inputs("generate", B) == {"prompts": [], "after": []}
    assert graph.inputs("generate", A) == {"prompts": [], "after": [graph.pilot()]}
    assert graph.inputs("generate", H) == {"prompts": [], "after": [graph.pilot()]}
    assert graph.inputs("audit", A) == {"completions": [graph.completions(A)], "rejected": [graph.rejected(A)]}
    assert graph.inputs("extract", B) == {"completions": [graph.completions(B)], "after": [graph.audit(B)]}
    assert graph.inputs("extract", A)["after"] == [graph.audit(A), graph.pilot()]
    assert graph.inputs("pilot", ONCE) == {
        "completions": [graph.completions(B)],
        "hidden": [graph.hidden(B)],
        "after": [graph.audit(B)],
    }
    assert graph.inputs("train", "0") == {
        "hidden": [graph.train_hidden(shard) for shard in TRAIN],
        "held_out": [graph.held_out_hidden(H)],
        "previous": [],
        "after": [graph.audit(shard) for shard in (*TRAIN, H)],
    }
    assert graph.inputs("evaluate", ONCE) == {
        "model": [drafted[0]],
        "config": [drafted[1]],
        "held_out": [graph.completions(H)],
    }
    assert graph.inputs("report", ONCE)["train"] == [graph.drafter(0, "train.json")]
    assert graph.inputs("audit_set", ONCE) == {"audits": [graph.audit(shard) for shard in (*TRAIN, H)]}


def test_published_prompts_are_an_input_and_new_ones_are_not_yet():
    graph = graph_of(configuration(), frozenset({layout.prompts(A)}))
    assert graph.inputs("generate", A)["prompts"] == [layout.prompts(A)]
    assert graph.inputs("generate", B)["prompts"] == []


@pytest.mark.parametrize(
    ("lead", "waits"), [(0, [None, None, 0, 0, 1]), (1, [None, None, None, None, 0]), (2, [None] * 5)]
)
def test_extraction_waits_for_the_window_that_must_be_gone(lead, waits):
    graph = window_graph(lead=lead)
    assert graph.windows == [[A, B], [C, D], [E]]
    for shard, window in zip(TRAIN, waits, strict=True):
        drafters = [key for key in graph.inputs("extract", shard)["after"] if key.startswith("drafter/")]
        assert drafters == ([] if window is None else [graph.drafter(window, "model.safetensors")])
    assert not any(key.startswith("drafter/") for key in edges(graph, "extract", H))


def test_windows_train_one_after_the_other_and_the_last_is_the_result():
    graph = window_graph()
    assert graph.inputs("train", "0")["previous"] == []
    for window in (1, 2):
        found = graph.inputs("train", str(window))
        assert found["hidden"] == [graph.train_hidden(shard) for shard in graph.windows[window]]
        assert found["previous"] == [graph.drafter(window - 1, name) for name in DRAFTER_FILES]
    assert graph.inputs("evaluate", ONCE)["model"] == [graph.drafter(2, "model.safetensors")]
    assert graph.inputs("report", ONCE)["train"] == [graph.drafter(window, "train.json") for window in range(3)]


def test_temporary_states_are_no_result_and_held_out_ones_are():
    keep, window = graph_of(configuration()), window_graph()
    states = [key for key in window.results() if key.startswith("hidden/")]
    assert states == [window.held_out_hidden(H)]
    assert {key for key in keep.results() if key.startswith("hidden/")} == {keep.hidden(shard) for shard in (*TRAIN, H)}
    assert window.held_out_hidden(H) != window.train_hidden(H)


def test_removed_states_of_trained_windows_are_not_made_again():
    graph = window_graph()
    jobs = [job for job in JOBS if job[0] not in ("extract", "train")] + [("extract", H)]
    built = with_outputs(graph, *jobs, *[("train", str(window)) for window in range(3)])
    assert reachable(built) == set()
    assert built.missing_rows() == {"generate": 0, "extract": 0}
    halfway = with_outputs(graph, *[job for job in jobs if job[0] not in ("evaluate", "report")], ("train", "0"))
    assert reachable(halfway) == {
        *[("extract", shard) for shard in (C, D, E)],
        ("train", "1"),
        ("train", "2"),
        ("evaluate", ONCE),
        ("report", ONCE),
    }
    assert halfway.missing_rows() == {"generate": 0, "extract": SIZES[C] + SIZES[D] + SIZES[E]}


def test_missing_rows_count_what_is_absent():
    graph = graph_of(configuration())
    assert graph.missing_rows() == {"generate": sum(SIZES.values()), "extract": sum(SIZES.values())}
    part = with_outputs(graph, ("generate", A), ("extract", A), ("generate", H))
    assert part.missing_rows() == {
        "generate": sum(SIZES.values()) - SIZES[A] - SIZES[H],
        "extract": sum(SIZES.values()) - SIZES[A],
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_the_spans_of_the_windows_are_the_whole_run_in_proportion_to_rows(size):
    graph = window_graph(size)
    spans = [graph.span(window) for window in range(len(graph.windows))]
    assert spans[0][0] == 0
    assert spans[-1][1] == 1
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert sum(end - start for start, end in spans) == pytest.approx(1)
    rows = sum(SIZES[shard] for shard in TRAIN)
    for (start, end), shards in zip(spans, graph.windows, strict=True):
        assert end - start == pytest.approx(sum(SIZES[shard] for shard in shards) / rows)


def test_only_training_takes_more_than_one_gpu():
    graph = graph_of(configuration(resources={"train_gpus": 4}))
    assert {stage: graph.gpus(stage) for stage in ("generate", "extract", "train", "evaluate")} == {
        "generate": 1,
        "extract": 1,
        "train": 4,
        "evaluate": 1,
    }


def test_no_two_jobs_make_the_same_object():
    graph = window_graph()
    made = makers(graph)
    assert len(made) == sum(len(graph.outputs(*job)) for job in set(made.values()))


def test_what_a_job_reads_is_told_from_what_it_waits_for_and_from_what_the_store_lacks():
    graph = graph_of(configuration(), frozenset({layout.prompts(B)}))
    made = with_outputs(graph, ("generate", B))
    assert graph.reads("generate", B) == {"prompts": [layout.prompts(B)]}
    assert graph.lacks("generate", B) == [graph.pilot()]
    assert made.reads("extract", B) == {"completions": [graph.completions(B)]}
    assert made.lacks("extract", B) == [graph.audit(B), graph.pilot()]
    assert made.reads("generate", B) == {}
    assert made.lacks("generate", B) == []


def test_the_shards_to_come_are_those_without_answers_in_their_turn():
    graph = with_outputs(graph_of(configuration(pilot=1)), ("generate", C))
    assert graph.coming(A) == [B, D, E, H]
    assert graph.coming(D) == [B, A, E, H]
    assert graph.coming(B) == []


@pytest.mark.parametrize(
    "hidden", [{}, {"policy": "window", "window_shards": 2, "window_lead": 0}], ids=["keep", "window"]
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fewer_edges_and_targets_find_the_same_jobs_in_the_same_order(hidden, data):
    config = configuration(hidden=hidden, pilot=data.draw(st.integers(0, 4)))
    empty = graph_of(config)
    made = makers(empty)
    graph = graph_of(config, frozenset(data.draw(st.sets(st.sampled_from(sorted(made))))))

    def before(job, edges, seen):
        """All jobs that a job waits for, directly or through others."""
        for key in edges(*job):
            if key in made and key not in graph.present and made[key] not in seen:
                seen.add(made[key])
                before(made[key], edges, seen)
        return seen

    def sentinel_and_job(stage, name):
        gated = stage in ("generate", "extract", "train", "evaluate")
        reads = [key for keys in graph.reads(stage, name).values() for key in keys]
        return [*graph.awaits(stage, name), *reads] if gated else graph.lacks(stage, name)

    jobs = {made[key] for key in graph.results() if key not in graph.present}
    assert {made[key] for key in graph.targets() if key not in graph.present} == jobs
    assert set(graph.targets()) <= set(graph.results())
    for job in reachable(graph):
        assert before(job, lambda *one: graph.awaits(*one), set()) == before(job, graph.lacks, set())
        assert before(job, sentinel_and_job, set()) == before(job, graph.lacks, set())
