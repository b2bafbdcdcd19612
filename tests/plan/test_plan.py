"""The plan as a pure function: counts, causes, prices and their words, over made-up listings."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.catalog import identify
from draftmill.config import Config
from draftmill.graph import Graph
from draftmill.plan.causes import name_of
from draftmill.plan.earlier import Earlier, objects_of, records_of
from draftmill.plan.jobs import PER_SHARD, STAGES, all_jobs, planned
from draftmill.plan.plan import plan, rows_taken_over
from draftmill.plan.rates import Done, Measured, Pilot, Size, rates_of, ratio
from draftmill.plan.text import lines
from draftmill.plan.types import Estimate, Plan, total
from draftmill.store.base import ObjectInfo
from tests.core.builds import HELD_OUT, SIZES, TRAIN, configuration, make_index, specs_of

A, B, C, D, E = TRAIN
(H,) = HELD_OUT
WINDOWS = {"policy": "window", "window_shards": 2, "window_lead": 0}
GPU = {"device": "cuda", "resources": {"gpu_hour_price": 2.0}}
OLD = "0123456789ab"
KIN = {A: {OLD: [[0, 4], [5, 10]]}}


def graph_over(config: Config, present: frozenset[str] = frozenset()) -> Graph:
    return Graph(config, make_index(), specs_of(config), present)


def made_by(graph: Graph, *stages: str) -> set[str]:
    return {key for job in all_jobs(graph) if job[0] in (stages or STAGES) for key in graph.outputs(*job)}


def records(graph: Graph, *stages: str) -> set[str]:
    return {layout.record(job[0], name_of(graph, job)) for job in all_jobs(graph) if job[0] in (stages or STAGES)}


def plan_for(
    config: Config,
    keys: set[str],
    *,
    before: Config | None = None,
    measured: Measured | None = None,
    kin: dict[str, Any] | None = None,
) -> Plan:
    """The plan over a store with some keys; `before` is the configuration whose specs old objects carry."""
    listing = {key: ObjectInfo(key, 1000, 5.0) for key in keys}
    graph = graph_over(config, frozenset(listing))
    old = specs_of(before) if before else None
    known = {(stage, old.fp[stage]): old.spec[stage] for stage in STAGES} if old else {}
    earlier = Earlier(objects_of(listing), records_of(listing), known)
    rates = rates_of(graph, measured or Measured())
    return plan(graph, listing, rates, earlier=earlier, kin=kin or {}, store="build")


def text_of(found: Plan) -> str:
    return "\n".join(lines(found))


def counts(found: Plan, stage: str) -> tuple[int, int, int, int]:
    one = found.stage(stage)
    return one.exist, one.new, one.changed, one.missing


# Counts ---------------------------------------------------------------------------------------------------------------

CONFIGS = [configuration(), configuration(hidden=WINDOWS), configuration(hidden={"taps": [0, 1]}, pilot=2)]
CANDIDATES = sorted({key for config in CONFIGS for key in made_by(graph_over(config)) | records(graph_over(config))})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CONFIGS), st.sets(st.sampled_from(CANDIDATES)), st.booleans())
def test_whatever_is_there_the_counts_add_up(config: Config, some: set[str], inverted: bool) -> None:
    keys = set(CANDIDATES) - some if inverted else some
    found = plan_for(config, keys, before=CONFIGS[0], kin=KIN)
    graph = graph_over(config, frozenset(keys))
    jobs = planned(graph)
    assert found.jobs == len(jobs) == sum(n for rule, n in found.rules.items() if rule not in ("all", "gpu_free"))
    reached = made_by(graph)
    for stage in found.stages:
        assert stage.exist + stage.new + stage.changed + stage.missing == stage.wanted
        assert stage.planned == sum(job[0] == stage.stage for job in jobs)
        assert stage.wanted <= sum(job[0] == stage.stage for job in all_jobs(graph))
        orphans = [key for key in keys - reached if (e := identify(key)) is not None and e.stage == stage.stage]
        assert stage.orphaned.objects == len([key for key in orphans if not key.startswith("records/")])
    assert text_of(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_an_empty_store_is_all_new_and_a_full_one_is_nothing() -> None:
    config = configuration()
    empty = plan_for(config, set())
    assert {stage.stage: stage.new for stage in empty.stages} == {
        **dict.fromkeys(PER_SHARD, 6),
        **dict.fromkeys(("pilot", "train", "audit_set", "evaluate", "report"), 1),
    }
    assert "generate: 6 jobs, not made before" in text_of(empty)
    full = plan_for(config, made_by(graph_over(config)))
    assert full.jobs == 0
    assert full.rules == {}
    assert text_of(full).endswith("Nothing is to be done.")


# Causes ---------------------------------------------------------------------------------------------------------------


def test_a_changed_setting_is_named_with_what_it_was_and_so_is_the_stage_behind_it() -> None:
    before, now = configuration(), configuration(train={"learning_rate": 1e-4})
    found = plan_for(now, made_by(graph_over(before)), before=before)
    (cause,) = found.stage("train").causes
    assert (cause.kind, cause.since) == ("setting", specs_of(before).fp["train"])
    assert [(one.setting, one.was, one.now) for one in cause.differences] == [("train.learning_rate", 6e-4, 1e-4)]
    assert counts(found, "train") == (0, 0, 1, 0)
    assert counts(found, "extract") == (6, 0, 0, 0)
    text = text_of(found)
    assert "train: 1 job, because train.learning_rate is 0.0001 and was 0.0006 (before: fingerprint" in text
    assert "evaluate: 1 job, because train changed (before: fingerprint" in text
    assert "6 objects (6 kB) in the store are of no use to this configuration" in text


def test_a_tap_is_named_once_and_followed_through_the_stages() -> None:
    before, now = configuration(), configuration(hidden={"taps": [0, 1]})
    found = plan_for(now, made_by(graph_over(before)), before=before)
    text = text_of(found)
    assert "extract: 6 jobs, because hidden.taps is [0, 1] and was [0, 2]" in text
    assert "pilot: 1 job, because extract changed" in text
    assert counts(found, "generate") == (6, 0, 0, 0)
    assert found.stage("train").causes[0].differences[0].setting == "hidden.taps"


def test_without_a_readable_old_object_the_setting_stays_unnamed() -> None:
    before, now = configuration(), configuration(generate={"temperature": 0.5})
    found = plan_for(now, made_by(graph_over(before)))
    assert "generate: 6 jobs, because settings changed (before: fingerprint" in text_of(found)
    assert found.stage("audit").causes[0].upstream == ("generate",)


def test_a_deleted_object_is_missing_if_a_record_knows_it_and_new_if_none_does() -> None:
    config = configuration()
    graph = graph_over(config)
    keys = made_by(graph) - {graph.audit(B)}
    assert counts(plan_for(config, keys), "audit") == (5, 1, 0, 0)
    found = plan_for(config, keys | records(graph))
    assert counts(found, "audit") == (5, 0, 0, 1)
    assert "audit: 1 job, because the object made before is missing" in text_of(found)


def test_edited_prompts_are_named_with_their_rows_and_the_shard_before() -> None:
    config = configuration()
    graph = graph_over(config)
    keys = {key for key in made_by(graph, *PER_SHARD) if A not in key}
    gone = {key.replace(A, OLD) for key in made_by(graph, *PER_SHARD) if A in key}
    found = plan_for(config, keys | gone, kin=KIN)
    assert [counts(found, stage) for stage in PER_SHARD] == [(5, 0, 1, 0)] * 3
    (edited,) = found.edited
    assert (edited.shard, edited.new, edited.instead_of, edited.new_rows) == (A, ((4, 5),), (OLD,), 1)
    text = text_of(found)
    assert "generate: 1 job, because prompts changed" in text
    assert f"shard {A}: 1 of 10 prompts new or edited (row 5), in place of {OLD}" in text
    # Half of max_new_tokens are assumed for the one answer that is left.
    assert found.stage("generate").need.tokens.value == 12
    assert "10 rows, of which at most 9 are taken over, 12 tokens" in text


def test_edited_prompts_of_what_was_never_made_are_new() -> None:
    assert counts(plan_for(configuration(), set(), kin=KIN), "generate") == (0, 6, 0, 0)


def test_rows_are_taken_over_only_from_answers_by_the_same_settings() -> None:
    config = configuration(generate={"samples": 2})
    graph = graph_over(config)
    answers = frozenset({layout.completions(OLD, graph.specs.fp["generate"])})
    assert rows_taken_over(graph, planned(graph), KIN) == 0
    whole = Graph(config, graph.index, graph.specs, answers)
    assert rows_taken_over(whole, planned(whole), KIN) == 2 * 9
    other = configuration(generate={"samples": 2, "temperature": 0.1})
    changed = Graph(other, graph.index, specs_of(other), answers)
    assert rows_taken_over(changed, planned(changed), KIN) == 0


def test_under_windows_a_learning_rate_extracts_again_and_the_price_is_told() -> None:
    before = configuration(GPU, hidden=WINDOWS)
    now = configuration(GPU, hidden=WINDOWS, train={"learning_rate": 1e-4})
    graph = graph_over(before)
    states = {graph.train_hidden(shard) for shard in TRAIN}
    rates = Measured(
        (Done("extract", graph.specs.fp["extract"], 10, 1000, 36.0),),
        Pilot(tokens=100, output_tokens=60, completions_bytes=50),
    )
    found = plan_for(now, (made_by(graph) - states) | records(graph), before=before, measured=rates)
    assert counts(found, "extract") == (1, 0, 0, 5)
    assert found.stage("extract").causes[0].kind == "removed"
    # 150 rows of 100 tokens in 2 taps of width 32 and two bytes; 0.036 GPU-seconds a token.
    assert found.states.written.value == found.states.again_bytes.value == 150 * 100 * 128
    assert found.states.again_hours.value == pytest.approx(150 * 100 * 0.036 / 3600)
    assert found.states.extracted_again == 5
    # A window of the two largest shards, nothing ahead, and the held-out shard that stays.
    assert found.states.peak.value == (50 + 40 + 8) * 100 * 128
    text = text_of(found)
    assert "extract: 5 jobs again, because hidden.policy window removed the states after training" in text
    assert (
        "5 shards extracted again, because hidden.policy window removed the states when they had been trained on: "
        "1.92 MB, 0.15 GPU-hours, $0.30" in text
    )


def test_states_over_the_budget_are_said_so() -> None:
    assert "over hidden.budget_gib" in text_of(plan_for(configuration(hidden={"budget_gib": 1e-6}), set()))
    assert "over hidden.budget_gib" not in text_of(plan_for(configuration(), set()))


# Rates ----------------------------------------------------------------------------------------------------------------


def test_a_ratio_by_hand() -> None:
    assert ratio([]) is None
    assert ratio([(3, 0)]) is None
    assert ratio([(6, 3)]) == Estimate(2.0)
    found = ratio([(1, 1), (3, 1)])
    # Mean 2, standard error 1 and t(0.975, 1) = 12.706; no rate is below zero.
    assert found == Estimate(2.0, 0.0, pytest.approx(2 + 12.706))
    even = ratio([(2, 1), (4, 2), (8, 4)])
    assert even == Estimate(2.0, 2.0, 2.0)


def test_a_sum_has_an_interval_only_if_every_part_has() -> None:
    assert total([Estimate(3, 0, 6), Estimate(4, 0, 8)]) == Estimate(7, 2, 12)
    assert total([Estimate(3, 0, 6), Estimate(4)]) == Estimate(7)
    assert total([Estimate(0.0), Estimate(4, 3, 5)]) == Estimate(4, 3, 5)
    assert total([]) == Estimate(0, 0, 0)


def test_sources_of_rates_in_their_order() -> None:
    graph = graph_over(configuration(plan={"generate_tokens_per_second": 4.0, "answer_tokens": 7}))
    fp = graph.specs.fp["generate"]
    pilot = Pilot(tokens=50, output_tokens=20, completions_bytes=400)
    one, two = Done("generate", fp, 10, 100, 20.0), Done("generate", fp, 10, 140, 20.0)
    old = Done("generate", OLD, 10, 300, 30.0)

    def found(*done: Done, pilot: Pilot | None = None) -> list[tuple[str, float, int]]:
        rates = rates_of(graph, Measured(done, pilot))
        chosen = (rates.answer_tokens, rates.seconds["generate"])
        return [(rate.source, pytest.approx(rate.estimate.value), rate.jobs) for rate in chosen]

    assert found() == [("default", 7, 0), ("default", 0.25, 0)]
    assert found(old) == [("older history", 30, 1), ("older history", 0.1, 1)]
    assert found(old, pilot=pilot) == [("pilot", 20, 1), ("older history", 0.1, 1)]
    assert found(old, one) == [("history", 10, 1), ("history", 0.2, 1)]
    assert found(old, one, two, pilot=pilot) == [("history", 12, 2), ("history", 40 / 240, 2)]


def test_the_size_of_completions_comes_from_the_listing() -> None:
    graph = graph_over(configuration())
    fp = graph.specs.fp["generate"]
    sizes = (Size(fp, 1000, 10), Size(fp, 4000, 20), Size(OLD, 9, 9))
    assert rates_of(graph, Measured(completions=sizes)).completion_bytes.source == "history"
    assert rates_of(graph, Measured(completions=sizes)).completion_bytes.estimate.value == pytest.approx(5000 / 30)
    assert rates_of(graph, Measured(completions=sizes[2:])).completion_bytes.source == "older history"


def test_amounts_by_hand_and_in_money() -> None:
    settings_ = {"answer_tokens": 10, "generate_tokens_per_second": 5, "extract_tokens_per_second": 20}
    config = configuration(
        {**GPU, "plan": {**settings_, "train_rows_per_second": 2, "evaluate_tokens_per_second": 1}},
        generate={"samples": 3},
        train={"epochs": 4, "max_length": 30},
        evaluate={"max_prompts": 3, "max_new_tokens": 8},
    )
    found = plan_for(config, set())
    rows = 3 * sum(SIZES.values())
    train_rows = 3 * (sum(SIZES.values()) - SIZES[H])
    # 100 bytes a prompt are 25 tokens.
    expected = {
        "generate": (rows, rows * 10, rows * 10 / 5),
        "extract": (rows, rows * 35, rows * 35 / 20),
        "train": (train_rows, train_rows * 4 * 30, train_rows * 4 / 2),
        "evaluate": (3, 3 * 8, 3 * 8 / 1),
    }
    for stage, (count, tokens, seconds) in expected.items():
        need = found.stage(stage).need
        assert (need.rows, need.tokens.value) == (count, tokens)
        assert need.gpu_hours.value == pytest.approx(seconds / 3600)
    hours = sum(seconds for _, _, seconds in expected.values()) / 3600
    assert found.gpu_hours.value == pytest.approx(hours)
    assert found.cost is not None
    assert found.cost.value == pytest.approx(hours * 2.0)
    assert found.gpu_hours.low is None
    assert "assumed; nothing was measured yet" in text_of(found)
    assert "20 tokens a second" in text_of(found)


def test_measured_rates_give_intervals_in_the_text() -> None:
    graph = graph_over(configuration(GPU))
    fp = graph.specs.fp
    done = [
        Done(stage, fp[stage], 10, tokens, seconds)
        for stage in ("generate", "extract", "train", "evaluate")
        for tokens, seconds in ((100, 20.0), (120, 22.0), (95, 21.0))
    ]
    found = plan_for(configuration(GPU), set(), measured=Measured(tuple(done)))
    assert found.gpu_hours.low is not None
    assert found.gpu_hours.low < found.gpu_hours.value < (found.gpu_hours.high or 0)
    text = text_of(found)
    assert "measured by 3 finished jobs" in text
    last = next(line for line in text.splitlines() if line.startswith("in all: "))
    assert " to " in last
    assert "$" in last


# JSON -----------------------------------------------------------------------------------------------------------------


def test_the_json_form_says_all_that_the_text_says() -> None:
    before = configuration(GPU, hidden=WINDOWS)
    values = plan_for(
        configuration(GPU, train={"learning_rate": 1e-4}), made_by(graph_over(before)), before=before
    ).to_json()
    assert json.loads(json.dumps(values)) == json.loads(json.dumps(values))
    assert set(values) == {
        "format",
        "jobs",
        "store",
        "device",
        "prompts",
        "stages",
        "rules",
        "edited",
        "orphaned_prompts",
        "states",
        "gpu_hours",
        "bytes",
        "price",
        "cost",
    }
    assert [stage["stage"] for stage in values["stages"]] == list(STAGES)
    train = {stage["stage"]: stage for stage in values["stages"]}["train"]
    assert set(train) == {
        *("stage", "fingerprint", "exist", "causes", "orphaned", "need"),
        *("wanted", "new", "changed", "missing", "planned"),
    }
    assert {"setting": "train.learning_rate", "was": 6e-4, "now": 1e-4} in train["causes"][0]["differences"]
    assert set(train["need"]["rates"]["speed"]) == {"estimate", "unit", "source", "jobs"}
