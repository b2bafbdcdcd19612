"""`draftmill verify`: a sound store is clean, every kind of damage is found where it is and nowhere else."""

import errno
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.canonical import digest_file
from draftmill.catalog import OBJECTS, identify
from draftmill.integrity.quarantine import quarantine
from draftmill.integrity.reader import Reader
from draftmill.integrity.verify import Options, verify
from draftmill.schemas import COMPLETIONS, PROMPTS, REJECTED
from tests.integrity.damage import edit_json, edit_rows, edit_states, flip, found, rerecord
from tests.integrity.stores import Toy

COPY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def objects(toy: Toy) -> list[str]:
    return sorted(key for key in toy.store.list() if (entry := identify(key)) and entry.kind in OBJECTS)


def test_a_finished_store_is_clean(toy):
    for deep in (False, True):
        verdict = verify(Reader(toy.store), Options(deep=deep))
        assert verdict.findings == []
        assert verdict.unopened == 0
        assert verdict.objects == len(objects(toy)) + 1  # and the index


# One object, spoilt; what is found of it without and with a look at every byte. -----------------------------------------


def empty(toy, key):
    toy.path(key).write_bytes(b"")


def truncated(toy, key):
    data = toy.path(key).read_bytes()
    toy.path(key).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("deep", [False, True])
def test_every_object_that_is_empty_or_cut_off_is_found(toy, deep):
    for key in objects(toy):
        data = toy.path(key).read_bytes()
        for spoil in (empty, truncated):
            spoil(toy, key)
            damaged = {k for k, what in found(toy.store, deep=deep) if what not in ("consumer",)}
            assert damaged == {key}, spoil
        toy.path(key).write_bytes(data)
    assert found(toy.store, deep=True) == set()


@COPY
@given(data=st.data())
def test_any_flipped_bit_of_any_object_is_found(toy, data):
    """The record's digest sees it, and an object without record (a prompt shard) is its own digest, up to its footer."""
    key = data.draw(st.sampled_from([key for key in objects(toy) if not key.startswith("prompts/")]))
    before = toy.path(key).read_bytes()
    flip(toy.path(key), data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7)))
    assert found(toy.store, deep=True) == {(key, "digest")}
    toy.path(key).write_bytes(before)


@COPY
@given(data=st.data())
def test_any_cut_of_any_object_is_found_without_reading_all(toy, data):
    key = data.draw(st.sampled_from(objects(toy)))
    before = toy.path(key).read_bytes()
    toy.path(key).write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
    assert {k for k, _ in found(toy.store)} == {key}
    toy.path(key).write_bytes(before)


def some(toy):
    """A train shard."""
    return toy.graph.train[0]


def lost_row(toy, key):
    edit_rows(toy.path(key), COMPLETIONS, lambda rows: rows[1:])


def duplicate_key(toy, key):
    edit_rows(toy.path(key), COMPLETIONS, lambda rows: [*rows, rows[0]])


def foreign_row(toy, key):
    edit_rows(toy.path(key), COMPLETIONS, lambda rows: [{**rows[0], "prompt_id": "0" * 32}, *rows[1:]])


def other_source(toy, key):
    edit_rows(toy.path(key), COMPLETIONS, lambda rows: [{**rows[0], "source": "elsewhere"}, *rows[1:]])


def also_completed(toy, key):
    """A rejected row that is a completion too."""
    rejected = toy.path(key.replace(".parquet", ".rejected.parquet"))

    def add(rows):
        first = read_first(toy.path(key))
        return [*rows, {**first, "reason": "empty", "detail": ""}]

    edit_rows(rejected, REJECTED, add)
    rerecord(toy.store, key.replace(".parquet", ".rejected.parquet"))


def read_first(path):
    from draftmill.schemas import read_rows

    return {name: read_rows(path, COMPLETIONS)[0][name] for name in ("prompt_id", "sample", "source")}


@pytest.mark.parametrize("spoil", [lost_row, duplicate_key, foreign_row, other_source, also_completed])
def test_rows_that_are_not_conserved(toy, spoil):
    """Even where the record agrees: the job itself may have been wrong. What was made from such rows goes too."""
    key = toy.graph.completions(some(toy))
    spoil(toy, key)
    rerecord(toy.store, key)
    assert (key, "rows") in found(toy.store)
    assert {k for k, what in found(toy.store) if what != "consumer"} == {key}


def test_prompts_are_known_by_their_shards_name(toy):
    key = toy.graph.prompts(some(toy))
    edit_rows(toy.path(key), PROMPTS, lambda rows: rows[:-1])
    assert found(toy.store) == {(key, "rows")}


def test_a_prompt_is_known_by_its_id(toy):
    key = toy.graph.prompts(some(toy))
    edit_rows(toy.path(key), PROMPTS, lambda rows: [{**rows[0], "record": '{"messages": []}'}, *rows[1:]])
    assert found(toy.store) == set()
    assert found(toy.store, deep=True) == {(key, "rows")}


def nan_state(tensors, _):
    tensors["hidden"][-1, 0, 0] = float("nan")


def infinite_state(tensors, _):
    tensors["hidden"][0, 1, 3] = float("inf")


def wrong_offsets(tensors, _):
    tensors["offsets"][1] += 1


def short_offsets(tensors, _):
    tensors["offsets"] = tensors["offsets"][:-1].clone()


def falling_offsets(tensors, _):
    tensors["offsets"][2] = tensors["offsets"][1]


def one_tap_less(tensors, _):
    tensors["hidden"] = tensors["hidden"][:, :1].clone()


def lost_tokens(tensors, _):
    tensors["input_ids"] = tensors["input_ids"][:-1].clone()


def other_type(tensors, _):
    tensors["hidden"] = tensors["hidden"].float()


def swapped_rows(_, metadata):
    metadata["rows"][:2] = reversed(metadata["rows"][:2])


def flat_states(tensors, _):
    tensors["hidden"] = tensors["hidden"].flatten(1).clone()


def offsets_without_end(tensors, _):
    tensors["offsets"] = tensors["offsets"].float()
    tensors["offsets"][-1] = float("nan")


def keys_of_lists(_, metadata):
    metadata["rows"][0] = [["x"], 0, "s"]


def keys_of_no_row(_, metadata):
    metadata["rows"] = []


def provenance_of_another_kind(_, metadata):
    metadata["provenance"] = [1]


def inputs_of_another_kind(_, metadata):
    metadata["provenance"]["inputs"] = "x"


def no_tensor(tensors, _):
    del tensors["loss_mask"]


STATES = {
    nan_state: "values",
    infinite_state: "values",
    wrong_offsets: "offsets",
    short_offsets: "offsets",
    falling_offsets: "offsets",
    one_tap_less: "shape",
    lost_tokens: "shape",
    other_type: "shape",
    swapped_rows: "rows",
    flat_states: "shape",
    offsets_without_end: "offsets",
    keys_of_lists: "rows",
    keys_of_no_row: "rows",
    provenance_of_another_kind: "provenance",
    inputs_of_another_kind: "provenance",
    no_tensor: "unreadable",
}


@pytest.mark.parametrize("spoil", STATES, ids=lambda spoil: spoil.__name__)
def test_hidden_states_that_do_not_fit(toy, spoil):
    key = toy.graph.hidden(some(toy))
    edit_states(toy.path(key), spoil)
    rerecord(toy.store, key)
    assert {pair for pair in found(toy.store) if pair[1] != "consumer"} == {(key, STATES[spoil])}


def test_every_state_and_token_is_looked_at_when_asked(toy):
    def in_the_middle(tensors, _):
        tensors["hidden"][len(tensors["hidden"]) // 2 + 1, 1, 3] = float("nan")

    def one_token(tensors, _):
        tensors["input_ids"][3] += 1

    for edit, what in ((in_the_middle, "values"), (one_token, "tokens")):
        key = toy.graph.hidden(toy.graph.train[1])
        before = toy.path(key).read_bytes()
        edit_states(toy.path(key), edit)
        rerecord(toy.store, key)
        assert {pair for pair in found(toy.store, deep=True) if pair[1] != "consumer"} == {(key, what)}
        toy.path(key).write_bytes(before)
        rerecord(toy.store, key)


def longer_answer(rows):
    return [{**rows[0], "output_ids": [*rows[0]["output_ids"], 70]}, *rows[1:]]


def test_states_of_answers_that_were_made_again_stand(toy):
    """An engine need not give the same tokens twice: what was made from the first answers is as good as they were."""
    shard = some(toy)
    answers = toy.graph.completions(shard)
    edit_rows(toy.path(answers), COMPLETIONS, longer_answer)
    rerecord(toy.store, answers)
    assert found(toy.store) == {(toy.graph.hidden(shard), "remade input"), (toy.graph.audit(shard), "remade input")}
    assert verify(Reader(toy.store)).damage == []


def test_states_of_other_answers_than_they_were_made_from(toy):
    shard = some(toy)
    states, answers = toy.graph.hidden(shard), toy.graph.completions(shard)
    edit_rows(toy.path(answers), COMPLETIONS, longer_answer)
    for record in toy.store.list("records/"):
        toy.store.delete(record)
    assert {pair for pair in found(toy.store) if pair[1] != "record missing"} == {(states, "offsets")}


@pytest.mark.parametrize("kind", ["completions", "audit", "hidden", "evaluation", "pilot", "train"])
def test_a_renamed_object_gives_itself_away(toy, kind):
    graph, (one, other) = toy.graph, toy.graph.train[:2]
    renamed = {
        "completions": (graph.completions(one), graph.completions(other)),
        "audit": (graph.audit(one), graph.audit(other)),
        "hidden": (graph.hidden(one), graph.hidden(other)),
        "evaluation": (graph.evaluation(), "eval/0123456789ab.json"),
        "pilot": (graph.pilot(), "pilot/0123456789ab.json"),
        "train": (graph.drafter(0, "train.json"), graph.drafter(1, "train.json")),
    }
    old, new = renamed[kind]
    toy.path(new).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(toy.path(old), toy.path(new))
    for record in toy.store.list("records/"):
        toy.store.delete(record)
    assert {(key, what) for key, what in found(toy.store) if what not in ("record missing", "incomplete")} == {
        (new, "name")
    }


def test_a_spec_that_was_edited_is_not_that_of_the_fingerprint(toy):
    key = toy.graph.evaluation()
    edit_json(toy.path(key), lambda value: value["provenance"]["spec"]["decoding"].update(max_prompts=99))
    rerecord(toy.store, key)
    assert found(toy.store) == {(key, "fingerprint")}


def test_bytes_that_the_disk_does_not_give_back(toy, monkeypatch):
    key = toy.graph.pilot()

    def read(path):
        if path == toy.path(key):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return digest_file(path)

    monkeypatch.setattr("draftmill.integrity.checks.digest_file", read)
    monkeypatch.setattr("draftmill.integrity.reader.digest_file", read)
    reader = Reader(toy.store)
    verdict = verify(reader, Options(deep=True))
    assert {(finding.key, finding.what) for finding in verdict.findings} == {(key, "unreadable")}
    assert quarantine(reader, verdict.findings).keys == [key]


def test_a_foreign_file_under_a_name_of_ours(toy):
    import pyarrow as pa
    import pyarrow.parquet as pq

    key = toy.graph.completions(some(toy))
    pq.write_table(pa.table({"text": ["hello"]}), toy.path(key))
    rerecord(toy.store, key)
    assert {pair for pair in found(toy.store) if pair[1] != "consumer"} == {(key, "schema")}


def test_a_foreign_file_is_named_and_left_alone(toy):
    for name in ("notes.txt", "completions/README.md", "audits/x.json"):
        toy.store.put(name, b"mine")
    verdict = verify(Reader(toy.store))
    assert {(finding.key, finding.what) for finding in verdict.findings} == {
        (name, "foreign") for name in ("notes.txt", "completions/README.md", "audits/x.json")
    }
    assert verdict.damage == []


def test_missing_and_damaged_records_are_notes(toy):
    graph, fp = toy.graph, toy.graph.specs.fp
    toy.store.delete(layout.record("evaluate", fp["evaluate"]))
    toy.store.put(layout.record("pilot", fp["pilot"]), b"{")
    assert found(toy.store) == {(graph.evaluation(), "record missing"), (graph.pilot(), "record unreadable")}
    assert verify(Reader(toy.store)).damage == []


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda value: value["rows"].pop(), "rows"),
        (lambda value: value.update(identical=value["identical"] - 1), "content"),
        (lambda value: value["target"].update(tokens=1), "content"),
        (lambda value: value.pop("drafter"), "content"),
        (lambda value: value.pop("provenance"), "provenance"),
    ],
)
def test_an_evaluation_that_contradicts_itself(toy, edit, what):
    key = toy.graph.evaluation()
    edit_json(toy.path(key), edit)
    rerecord(toy.store, key)
    assert {pair for pair in found(toy.store) if pair[1] != "consumer"} == {(key, what)}


def test_an_audit_of_other_rows(toy):
    key = toy.graph.audit(some(toy))

    def one_more(value):
        counts = next(iter(value["measurements"]["by_source"].values()))
        counts["rejected"] = {"empty": sum(counts["rejected"].values()) + 1}

    edit_json(toy.path(key), one_more)
    rerecord(toy.store, key)
    assert {pair for pair in found(toy.store) if pair[1] != "consumer"} == {(key, "rows")}


def test_a_drafter_that_engines_would_load_wrongly(toy):
    config, model = (toy.graph.drafter(0, name) for name in ("config.json", "model.safetensors"))
    edit_json(toy.path(config), lambda value: value.pop("rope_theta"))
    rerecord(toy.store, config)
    assert {pair for pair in found(toy.store) if pair[1] != "consumer"} == {(model, "contract")}


def test_weights_that_are_not_finite(toy):
    from safetensors.torch import load_file, save_file

    model = toy.graph.drafter(0, "model.safetensors")
    weights = load_file(toy.path(model))
    weights["norm.weight"][0] = float("nan")
    save_file(weights, toy.path(model), metadata={"format": "pt"})
    rerecord(toy.store, model)
    assert (model, "contract") not in found(toy.store)
    assert (model, "contract") in found(toy.store, deep=True)


def test_what_a_kill_left_behind_is_a_note(toy):
    shard, fp = some(toy), toy.graph.specs.fp
    toy.store.put(f"{layout.journal('generate', f'{shard}-' + fp['generate'])}/00000000.jsonl", b"x")
    toy.store.put(
        f"{layout.journal('generate', 'ab' * 6 + '-' + fp['generate'])}/00000000.jsonl", b"work to go on with"
    )
    claim = {
        "owner": "x",
        "holder": {"pid": 1, "start": 1, "boot": None, "namespace": None},
        "host": "gone",
        "run": "r",
    }
    toy.store.put(f"claims/generate/{shard}-{fp['generate']}.json", json.dumps({**claim, "expires": 0.0}).encode())
    toy.store.put(f"claims/extract/{shard}-{fp['extract']}.json", json.dumps({**claim, "expires": 1e12}).encode())
    toy.store.put(layout.probe(), b"the self-test of a build that was killed")
    assert found(toy.store) == {
        (layout.journal("generate", f"{shard}-{fp['generate']}"), "orphaned journal"),
        (f"claims/generate/{shard}-{fp['generate']}.json", "orphaned claim"),
    }


# Shares ---------------------------------------------------------------------------------------------------------------


def test_a_sample_takes_whole_shards_and_all_that_belongs_to_none(toy):
    whole = verify(Reader(toy.store)).objects
    alone = sum(identify(key).shard == "" for key in objects(toy)) + 1
    assert verify(Reader(toy.store), Options(sample=0.0)).objects == alone
    seen = {verify(Reader(toy.store), Options(sample=0.5, seed=seed)).objects for seed in range(8)}
    assert seen <= {alone + 6 * n for n in range(5)} | {whole}
    assert len(seen) > 1


def test_the_same_seed_looks_at_the_same_share(toy):
    key = toy.graph.completions(some(toy))
    empty(toy, key)
    seen = [(key, "empty") in found(toy.store, sample=0.5, seed=seed) for seed in range(12)]
    assert seen == [(key, "empty") in found(toy.store, sample=0.5, seed=seed) for seed in range(12)]
    assert {True, False} == set(seen)
