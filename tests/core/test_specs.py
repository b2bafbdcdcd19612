"""Which key decides what: every key of the configuration with the stages whose fingerprint changes, and no other's."""

from dataclasses import replace

import pytest

from draftmill import specs as specs_module
from draftmill.invalidation import effects, markdown, raised
from draftmill.prompts.scan import Counts
from draftmill.specs import SPEC_VERSIONS, Specs, windows
from tests.core.builds import COUNTS, HELD_OUT, TRAIN, configuration, make_index, specs_of

EVALUATED = frozenset({"evaluate", "report"})
TRAINED = EVALUATED | {"train"}
EXTRACTED = TRAINED | {"extract", "pilot"}
AUDITED = frozenset({"audit", "audit_set"})
GENERATED = EXTRACTED | AUDITED | {"generate"}
# The shards themselves: prompts/index.py makes the index anew, and shard names carry the change to the other stages.
INDEX = frozenset({"index"})
NOTHING: frozenset[str] = frozenset()

# What a change of any key of a section makes anew; a new key must fit, or stand in TABLE with what it makes anew.
SECTIONS: dict[str, frozenset[str]] = {
    "target.": GENERATED,
    "prompts.": INDEX,
    "generate.": GENERATED,
    "generate.sglang.": NOTHING,
    "audit.": AUDITED,
    "drafter.": TRAINED,
    "train.": TRAINED,
    "evaluate.": EVALUATED,
    "resources.": NOTHING,
    "s3.": NOTHING,
    "plan.": NOTHING,
    # The gate decides when a job runs, never what it makes.
    "gate.": NOTHING,
}
TABLE: dict[str, frozenset[str]] = {
    "device": GENERATED,  # by dtype: auto
    "store": NOTHING,
    "pilot": frozenset({"pilot"}),
    # What decides a prompt's token ids decides which prompts are too long.
    "target.model": GENERATED | INDEX,
    "target.revision": GENERATED | INDEX,
    "target.context_length": EVALUATED | INDEX,
    "target.chat_template_args": GENERATED | INDEX,
    "prompts.max_bad": NOTHING,
    "generate.max_new_tokens": GENERATED | INDEX,
    "generate.mix": GENERATED | INDEX,
    "generate.flush_rows": NOTHING,
    "generate.flush_seconds": NOTHING,
    "hidden.taps": EXTRACTED,
    "hidden.num_taps": EXTRACTED,
    "hidden.batch_tokens": NOTHING,
    "hidden.policy": TRAINED,
    "hidden.window_shards": NOTHING,
    "hidden.window_lead": NOTHING,
    "hidden.budget_gib": NOTHING,
    "hidden.canary_rows": NOTHING,
    "drafter.sliding_window": NOTHING,
    "train.micro_batch_rows": NOTHING,
    "train.save_every": NOTHING,
}
# Where a setting makes another or the only difference.
UNDER: dict[tuple[str, str], frozenset[str]] = {
    # The device decides the weights in training even when the target computes alike.
    ("device", "`target.dtype: float32`"): TRAINED,
    ("generate.batch_size", "`generate.engine: sglang`"): NOTHING,
    ("hidden.num_taps", "`hidden.taps` by hand"): NOTHING,
    ("hidden.window_shards", "`hidden.policy: window`"): TRAINED,
    ("drafter.sliding_window", "`drafter.sliding_layers`"): TRAINED,
}
IN_LISTS: dict[str, frozenset[str]] = {"generate.mix[].": GENERATED, "generate.mix[].max_new_tokens": GENERATED | INDEX}


def expected(key: str, table: dict[str, frozenset[str]]) -> frozenset[str]:
    """The entry of the key, or that of the innermost section that has one."""
    return table[max((name for name in table if key == name or (name.endswith(".") and key.startswith(name))), key=len)]


@pytest.mark.parametrize("effect", effects(), ids=lambda effect: effect.key)
def test_a_key_decides_exactly_its_stages(effect):
    if effect.stages is None:
        assert [set(stages) for stages in effect.under.values()] == [expected(effect.key, IN_LISTS)]
        return
    assert set(effect.stages) == expected(effect.key, SECTIONS | TABLE), "say in TABLE what the key makes anew"
    under = {situation: stages for (key, situation), stages in UNDER.items() if key == effect.key}
    assert {situation: set(stages) for situation, stages in effect.under.items()} == under


def test_every_key_was_changed():
    assert {effect.key for effect in effects()} >= {*TABLE, *(key for key, _ in UNDER)}
    assert all(effect.stages is not None or effect.under for effect in effects())


def test_the_table_for_people_names_every_key_once_a_situation():
    text = markdown()
    for effect in effects():
        assert f"`{effect.key}`" in text
    assert "| `hidden.window_shards` with `hidden.policy: window` |  |  |  |  |  | ● | ● |  | ● |" in text


@pytest.mark.parametrize("stage", SPEC_VERSIONS)
def test_the_table_of_versions_is_that_of_the_specs(stage):
    before = dict(specs_module.SPEC_VERSIONS)
    assert stage in raised(stage)
    assert before == specs_module.SPEC_VERSIONS


@pytest.mark.parametrize("stage", SPEC_VERSIONS)
def test_a_raised_version_changes_its_stage_and_what_follows(stage, monkeypatch):
    follows = {"generate": GENERATED, "audit": AUDITED, "extract": EXTRACTED, "train": TRAINED, "evaluate": EVALUATED}
    before = specs_of(configuration()).fp
    monkeypatch.setattr("draftmill.specs.SPEC_VERSIONS", {**SPEC_VERSIONS, stage: 99})
    after = specs_of(configuration()).fp
    assert {name for name in before if before[name] != after[name]} == follows.get(stage, {stage})


def test_the_fingerprints_of_a_fixed_configuration_are_the_same_on_every_machine():
    assert specs_of(configuration()).fp == specs_of(configuration()).fp
    fingerprints = list(specs_of(configuration()).fp.values())
    assert len(set(fingerprints)) == len(SPEC_VERSIONS)
    assert all(len(fp) == 12 and int(fp, 16) >= 0 for fp in fingerprints)


def specs_over(train: tuple[str, ...] = TRAIN, counts: Counts = COUNTS) -> Specs:
    return specs_of(configuration(), replace(make_index(train), counts=counts))


def test_a_new_shard_changes_training_and_the_set_but_no_other_shard():
    before, after = specs_over(TRAIN[:4]), specs_over()
    assert {stage for stage in before.fp if before.fp[stage] != after.fp[stage]} == TRAINED | {"audit_set"}


def test_what_became_of_bad_records_shows_in_the_report_alone():
    before, after = specs_over(), specs_over(counts=replace(COUNTS, duplicates=3))
    assert {stage for stage in before.fp if before.fp[stage] != after.fp[stage]} == {"report"}


def test_windows_cut_the_shards_in_order():
    assert windows(configuration(), TRAIN) == [list(TRAIN)]
    config = configuration(hidden={"policy": "window", "window_shards": 2})
    assert windows(config, TRAIN) == [["a" * 12, "b" * 12], ["c" * 12, "d" * 12], ["e" * 12]]
    assert windows(config, ()) == []


def test_provenance_names_stage_spec_and_inputs():
    specs = specs_of(configuration())
    found = specs.provenance("train", window=0, hidden=list(HELD_OUT))
    assert found == {
        "stage": "train",
        "fingerprint": specs.fp["train"],
        "spec": specs.spec["train"],
        "inputs": {"window": 0, "hidden": list(HELD_OUT)},
    }
