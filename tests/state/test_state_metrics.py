"""The Prometheus text, read back by Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftmill.state.metrics import metrics
from draftmill.state.state import read_state
from draftmill.state.types import State
from tests.state.made_store import MadeStore
from tests.state.memory import Memory


@pytest.fixture
def state(made: MadeStore, memory: Memory) -> State:
    return read_state(memory, clock=lambda: made.now)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_prometheus_reads_the_state(state: State) -> None:
    found = samples(metrics(state))
    generate = state.stage("generate")
    of = {"stage": "generate"}
    assert found["draftmill_jobs", frozenset({**of, "state": "done"}.items())] == generate.jobs.done
    assert found["draftmill_units", frozenset({**of, "unit": "rows", "kind": "useful"}.items())] == generate.rows.useful
    assert found["draftmill_tokens_per_second", frozenset({**of, "span": "hour"}.items())] == generate.token_rate.hour
    assert found["draftmill_eta_seconds", frozenset({"bound": "high"}.items())] == state.eta.high
    assert found["draftmill_finished", frozenset()] == 0
    assert sum(name == "draftmill_lane" for name, _ in found) == len(state.lanes)


def test_what_is_not_known_is_left_out(made: MadeStore) -> None:
    found = samples(metrics(read_state(Memory(), clock=lambda: made.now)))
    names = {name for name, _ in found}
    assert "draftmill_finished" in names
    assert not names & {"draftmill_eta_seconds", "draftmill_jobs_wanted", "draftmill_cost", "draftmill_lane"}


@pytest.mark.parametrize("host", ['a"b', "a\\b", "a\nb", "a\\", '\\"\n', "ü}", "{x=1} 2"])
def test_labels_are_escaped(state: State, host: str) -> None:
    lane = replace(state.lanes[0], host=host)
    found = samples(metrics(replace(state, lanes=(lane,))))
    ages = [dict(labels) for name, labels in found if name == "draftmill_lane_heartbeat_age_seconds"]
    assert [labels["host"] for labels in ages] == [host]


def test_names_carry_units_and_every_metric_is_typed(state: State) -> None:
    lines = metrics(state).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) >= 20
    assert all(name.startswith("draftmill_") for name in names)
    assert metrics(state).endswith("\n")
