"""What planning asks of the graph grows with the jobs and no faster, and the bare Snakefile has as many jobs and files."""

from pathlib import Path

import pytest

from benchmarks.planning import bare, measure, project
from draftmill.graph import Graph
from draftmill.plan.jobs import all_jobs, planned
from draftmill.prompts.index import Index
from draftmill.prompts.scan import ShardEntry
from tests.core.builds import COUNTS, configuration, specs_of

ASKED: list[str] = []


class Counting(Graph):
    """A graph that remembers whose outputs were asked for."""

    def outputs(self, stage: str, name: str) -> list[str]:
        ASKED.append(stage)
        return super().outputs(stage, name)


def graph_with(shards: int, hidden: dict[str, object]) -> Counting:
    """A half-built graph: every second shard has all it needs."""
    entries = [ShardEntry(f"{n:012x}", 10, "train", 1000) for n in range(shards)]
    index = Index(1, {}, (), COUNTS, (*entries, ShardEntry("f" * 12, 10, "held_out", 1000)))
    config = configuration(hidden=hidden)
    empty = Counting(config, index, specs_of(config, index), frozenset())
    built = [(stage, shard) for stage in ("generate", "audit", "extract") for shard in empty.train[::2]]
    return Counting(config, index, empty.specs, frozenset(key for job in built for key in empty.outputs(*job)))


def asked_by_a_plan(graph: Counting) -> int:
    """Outputs that are looked at while every job's edges and parameters are asked for, twice as Snakemake does."""
    ASKED.clear()
    for _ in range(2):
        for stage, name in all_jobs(graph):
            graph.reads(stage, name)
            graph.lacks(stage, name)
            if stage == "generate":
                graph.coming(name)
                graph.turn(stage, name)
    graph.results()
    planned(graph)
    return len(ASKED)


@pytest.mark.parametrize(
    "hidden", [{}, {"policy": "window", "window_shards": 4, "window_lead": 1}], ids=["keep", "window"]
)
def test_twice_the_shards_ask_twice_as_much(hidden: dict[str, object]) -> None:
    small, large = (asked_by_a_plan(graph_with(count, hidden)) for count in (400, 800))
    assert large < 2.1 * small


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Graph]:
    folder = tmp_path_factory.mktemp("planning")
    return folder, project.make(folder / "real", 12)


@pytest.mark.slow
def test_the_bare_snakefile_plans_as_many_jobs_over_as_many_files(made: tuple[Path, Graph]) -> None:
    folder, graph = made
    jobs = []
    for present in (False, True):
        bare.write(folder / "bare", graph.shards, present=present)
        (project.fill if present else project.empty)(folder / "real/build", project.objects(graph))
        jobs.append([measure.plan(folder / kind, real=kind == "real").jobs for kind in ("real", "bare")])
    # Sentinels of generate, extract, train and evaluate, the jobs themselves, and the target.
    assert jobs == [[5 * 12 + 2 + 5 + 1] * 2, [0, 0]]
    files = [path for path in (folder / "bare").rglob("*") if path.is_file()]
    beside = ("Snakefile", "shards.txt", "plan.log")
    kept = [path for path in files if path.name not in beside and ".snakemake" not in path.parts]
    assert len(kept) == len(project.objects(graph)) + 12
