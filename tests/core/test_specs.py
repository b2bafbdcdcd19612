"""Which key decides what: every key of the configuration with the stages whose fingerprint changes, and no other's."""

from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
from pydantic import BaseModel

from draftmill.config import Config, GenerateConfig
from draftmill.prompts import index as index_module
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


class Case(NamedTuple):
    """A changed value, what it decides, and the settings under which it does."""

    value: Any
    stages: frozenset[str]
    base: dict[str, Any] | None = None


TABLE: dict[str, Case] = {
    "device": Case("cuda", GENERATED),  # by dtype: auto
    "store": Case("elsewhere", NOTHING),
    "pilot": Case(1, frozenset({"pilot"})),
    "target.model": Case("org/other", GENERATED | INDEX),
    "target.revision": Case("b" * 40, GENERATED | INDEX),
    "target.dtype": Case("bfloat16", GENERATED),
    "target.attention": Case("eager", GENERATED),
    "target.trust_remote_code": Case(True, GENERATED),
    "target.context_length": Case(256, EVALUATED | INDEX),
    "target.chat_template_args": Case({"enable_thinking": False}, GENERATED | INDEX),
    "prompts.sources": Case([{"path": "other.jsonl"}], INDEX),
    "prompts.max_prompts": Case(7, INDEX),
    "prompts.system": Case("Be brief.", INDEX),
    "prompts.shard_rows": Case(20, INDEX),
    "prompts.held_out": Case(0.3, INDEX),
    "prompts.max_bad": Case(0.5, NOTHING),
    "generate.max_new_tokens": Case(25, GENERATED | INDEX),
    "generate.temperature": Case(0.5, GENERATED),
    "generate.top_p": Case(0.5, GENERATED),
    "generate.top_k": Case(5, GENERATED),
    "generate.min_p": Case(0.1, GENERATED),
    "generate.samples": Case(2, GENERATED),
    "generate.seed": Case(1, GENERATED),
    "generate.batch_size": Case(3, GENERATED),
    "generate.attempts": Case(5, GENERATED),
    "generate.max_token_run": Case(9, GENERATED),
    "generate.flush_rows": Case(9, NOTHING),
    "generate.flush_seconds": Case(9.0, NOTHING),
    "audit.max_spike": Case(0.5, AUDITED),
    "audit.short_tokens": Case(9, AUDITED),
    "audit.max_short": Case(0.5, AUDITED),
    "audit.max_empty": Case(0.5, AUDITED),
    "audit.max_cut": Case(0.5, AUDITED),
    "audit.max_unclosed_thinking": Case(0.6, AUDITED),
    "audit.max_repetitive": Case(0.5, AUDITED),
    "audit.max_duplicates": Case(0.5, AUDITED),
    "audit.max_boundary_moved": Case(0.5, AUDITED),
    "audit.max_rejected": Case(0.5, AUDITED),
    "audit.min_mean_loss_tokens": Case(2.0, AUDITED),
    "audit.examples": Case(1, AUDITED),
    "hidden.taps": Case([0, 1], EXTRACTED),
    "hidden.num_taps": Case(3, EXTRACTED, {"hidden": {"taps": "auto"}}),
    "hidden.batch_tokens": Case(99, NOTHING),
    "hidden.policy": Case("window", TRAINED, {"hidden": {"window_shards": 2}}),
    "hidden.window_shards": Case(2, TRAINED, {"hidden": {"policy": "window"}}),
    "hidden.window_lead": Case(0, NOTHING, {"hidden": {"policy": "window", "window_shards": 1}}),
    "hidden.budget_gib": Case(1.0, NOTHING),
    "hidden.canary_rows": Case(5, NOTHING),
    "drafter.layers": Case(2, TRAINED),
    "drafter.block_size": Case(5, TRAINED),
    "drafter.heads": Case(2, TRAINED),
    "drafter.kv_heads": Case(1, TRAINED),
    "drafter.head_dim": Case(16, TRAINED),
    "drafter.intermediate_size": Case(48, TRAINED),
    "drafter.sliding_layers": Case(1, TRAINED),
    "drafter.sliding_window": Case(9, TRAINED, {"drafter": {"sliding_layers": 1}}),
    "drafter.mask_token_id": Case(9, TRAINED),
    "train.epochs": Case(3, TRAINED),
    "train.learning_rate": Case(1e-3, TRAINED),
    "train.min_learning_rate": Case(1e-5, TRAINED),
    "train.warmup": Case(0.1, TRAINED),
    "train.weight_decay": Case(0.1, TRAINED),
    "train.betas": Case([0.8, 0.9], TRAINED),
    "train.clip_norm": Case(2.0, TRAINED),
    "train.anchors": Case(3, TRAINED),
    "train.batch_rows": Case(3, TRAINED),
    "train.micro_batch_rows": Case(2, NOTHING),
    "train.max_length": Case(99, TRAINED),
    "train.loss_decay": Case(3.0, TRAINED),
    "train.loss": Case("dpace", TRAINED),
    "train.seed": Case(3, TRAINED),
    "train.save_every": Case(9, NOTHING),
    "evaluate.max_prompts": Case(9, EVALUATED),
    "evaluate.max_new_tokens": Case(9, EVALUATED),
    "evaluate.prompt_lookup_tokens": Case(9, EVALUATED),
    "evaluate.bootstrap": Case(9, EVALUATED),
    "resources.cpu_threads": Case(2, NOTHING),
    "resources.cpu_threads_alone": Case(2, NOTHING),
    "resources.train_gpus": Case(2, NOTHING),
    "resources.gpu_retries": Case(3, NOTHING),
    # The gate decides when a job runs, never what it makes.
    "gate": Case({"wait_s": 5.0, "max_used_mib": 1, "sentinel": "in_job", "lock_dir": "x"}, NOTHING),
}
# Keys with one allowed value; what they must be part of.
SINGLE = {"generate.engine": "generate"}
# Settings without effect where nothing reads them must not invalidate finished work either.
WITHOUT_EFFECT = {
    "hidden.num_taps": Case(3, NOTHING),
    "hidden.window_shards": Case(2, NOTHING),
    "drafter.sliding_window": Case(9, NOTHING),
}


def keys(model: type[BaseModel], name: str = "") -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        kind = field.annotation
        inner = isinstance(kind, type) and issubclass(kind, BaseModel) and key != "gate"
        found += keys(kind, f"{name}{key}.") if inner else [f"{name}{key}"]
    return found


def test_every_key_has_its_entry():
    assert sorted(keys(Config)) == sorted([*TABLE, *SINGLE]), "say in TABLE which stages the new key decides"


def names(config: Config) -> dict[str, Any]:
    """Fingerprints by stage, and what decides the index."""
    room = (config.target.context_length or 512) - config.generate.max_new_tokens
    return {**specs_of(config).fp, "index": index_module._spec(config, room)}


def changed(key: str, case: Case) -> set[str]:
    section, _, name = key.partition(".")
    after = configuration(case.base, **{section: {name: case.value} if name else case.value})
    before = configuration(case.base)
    assert after != before, "the entry's value is no change"
    old, new = names(before), names(after)
    return {stage for stage in old if old[stage] != new[stage]}


@pytest.mark.parametrize("key", TABLE)
def test_a_key_decides_exactly_its_stages(key):
    assert changed(key, TABLE[key]) == TABLE[key].stages


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_setting_that_nothing_reads_decides_nothing(key):
    assert changed(key, WITHOUT_EFFECT[key]) == set()


def test_the_device_decides_the_weights_in_training_even_when_the_target_computes_alike():
    assert changed("device", Case("cuda", TRAINED, {"target": {"dtype": "float32"}})) == TRAINED


def test_keys_with_one_value_are_part_of_their_stage():
    assert get_args(GenerateConfig.model_fields["engine"].annotation) == ("transformers",)
    for key, stage in SINGLE.items():
        assert key.partition(".")[2] in specs_of(configuration()).spec[stage]["sampling"]


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
