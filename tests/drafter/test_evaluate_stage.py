"""The evaluate stage: true counts, honest intervals, and a refusal when the text is not the target's."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftmill.config import EvaluateConfig, TrainConfig
from draftmill.drafter.acceptance import Answer, summarize
from draftmill.drafter.checkpoint import load_drafter
from draftmill.drafter.decode import greedy
from draftmill.errors import UserError
from draftmill.hidden_states import HiddenRow, RowKey, write_shard
from draftmill.stages import evaluate
from draftmill.stages.evaluate import HeldOutPrompt, evaluate_drafter, first_difference
from draftmill.stages.train import train_window

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3)
    return model


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [
        HeldOutPrompt(
            f"p{number}", "even" if number % 2 == 0 else "odd", torch.randint(8, 50, (4,), generator=generator).tolist()
        )
        for number in range(6)
    ]


@pytest.fixture
def run(tmp_path, target, prompts):
    def evaluate_with(drafter, **changes):
        arguments = {
            "prompts": prompts,
            "drafter": drafter,
            "target": target,
            "stop": [3],
            "config": EvaluateConfig(max_new_tokens=20, bootstrap=50, prompt_lookup_tokens=4),
            "context_length": 256,
            "exact": True,
            "output": tmp_path / "eval.json",
            "provenance": {"fingerprint": "e"},
        }
        return evaluate_drafter(**{**arguments, **changes})

    return evaluate_with


def test_statistics_by_hand():
    # Blocks of up to 3 proposals: 1 + (3+1) + (1+1) + (0+1) = 8 tokens, and 1 + (2+1) = 4 tokens.
    answers = [Answer("a", 8, [3, 1, 0]), Answer("b", 4, [2])]
    found = summarize(answers, most=3, resamples=20)
    assert (found["tokens"], found["target_forwards"], found["saved_forwards"]) == (12, 6, 6)
    assert found["saved_share"]["mean"] == 0.5
    assert found["acceptance_length"]["mean"] == pytest.approx(10 / 4)
    # Room: 3, 3 (tokens 6 to 8), 1; and 3.
    assert answers[0].room(3) == [3, 3, 1]
    assert [(row["blocks"], row["share"]["mean"]) for row in found["by_position"]] == [
        (4, pytest.approx(3 / 4)),
        (3, pytest.approx(2 / 3)),
        (3, pytest.approx(1 / 3, abs=1e-6)),
    ]
    assert found["by_source"]["b"]["acceptance_length"] == {"mean": 3.0, "low": 3.0, "high": 3.0}


def test_an_answer_without_blocks_counts_as_nothing_saved():
    found = summarize([Answer("a", 1, [])], most=3, resamples=5)
    assert found["saved_share"]["mean"] == 0
    assert found["by_position"] == []


def test_intervals_hold_the_mean_and_are_repeatable():
    answers = [Answer("a", 1 + sum(taken) + len(taken), taken) for taken in ([3, 3], [0, 0, 1], [2], [1, 0], [3])]
    found = summarize(answers, 3, 500)
    interval = found["acceptance_length"]
    assert interval["low"] < interval["mean"] < interval["high"]
    assert found == summarize(answers, 3, 500)


def test_the_result_is_counted_from_real_decoding(run, make_drafter, target, prompts, tmp_path):
    result = run(make_drafter())
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(result))
    assert (result["prompts"], result["identical"], result["divergences"], result["too_long"]) == (6, 6, [], 0)
    for row, prompt in zip(result["rows"], prompts, strict=True):
        answer = greedy(target, prompt.prompt_ids, 20, [3]).tokens
        assert row["output_ids"] == answer
        assert sum(row["drafter_accepted"]) + len(row["drafter_accepted"]) + 1 - len(answer) in (0, 1)
    tokens = sum(len(row["output_ids"]) for row in result["rows"])
    forwards = sum(1 + len(row["drafter_accepted"]) for row in result["rows"])
    assert result["target"]["tokens"] == result["drafter"]["tokens"] == tokens
    assert result["drafter"]["target_forwards"] == forwards
    assert set(result["drafter"]["by_source"]) == {"even", "odd"}
    first = (tmp_path / "eval.json").read_bytes()
    run(make_drafter())
    assert (tmp_path / "eval.json").read_bytes() == first


def test_the_context_limits_answers_and_prompts(run, make_drafter, prompts):
    result = run(make_drafter(), context_length=9)
    assert max(len(row["output_ids"]) for row in result["rows"]) == 5
    longer = [*prompts, HeldOutPrompt("long", "even", [9] * 9)]
    assert run(make_drafter(), context_length=9, prompts=longer)["too_long"] == 1
    with pytest.raises(UserError, match="None of the 6 held-out prompts is shorter than the context of 4 tokens"):
        run(make_drafter(), context_length=4)


def test_only_so_many_prompts_are_decoded(run, make_drafter):
    assert run(make_drafter(), config=EvaluateConfig(max_prompts=2, max_new_tokens=4, bootstrap=5))["prompts"] == 2


@pytest.mark.slow
def test_another_text_is_refused_unless_it_is_a_near_tie(run, make_drafter, monkeypatch):
    def with_gap(gap):
        def other(*arguments):
            found = greedy(*arguments)
            found.tokens[2] = (found.tokens[2] + 1) % 50
            found.gaps[2] = gap
            return found

        return other

    monkeypatch.setattr(evaluate, "greedy", with_gap(0.5))
    with pytest.raises(RuntimeError, match=r"left the target's text at token 2 of prompt p\d, .* 0\.5 apart"):
        run(make_drafter())
    assert run(make_drafter(), exact=False)["identical"] == 0
    monkeypatch.setattr(evaluate, "greedy", with_gap(5e-4))
    result = run(make_drafter())
    assert result["identical"] == 0
    assert {found["gap"] for found in result["divergences"]} == {5e-4}


def test_differences_are_found_where_they_begin():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.slow
def test_training_on_the_targets_own_answers_raises_acceptance(
    run, make_drafter, make_shape, target, prompts, tmp_path
):
    """From the target's states to fewer forwards of the target, with every stage real."""
    drafter = make_drafter()
    rows = []
    for number in range(60):
        prompt = torch.randint(8, 50, (4,), generator=torch.Generator().manual_seed(100 + number)).tolist()
        answer = greedy(target, prompt, 20, []).tokens
        ids = torch.tensor([*prompt, *answer])
        hidden = target(input_ids=ids[None], output_hidden_states=True).hidden_states
        states = torch.stack([hidden[tap + 1][0] for tap in drafter.shape.taps], 1).bfloat16()
        rows.append(HiddenRow(RowKey(str(number), 0, "s"), ids, (torch.arange(len(ids)) >= 4).byte(), states))
    write_shard(tmp_path / "shard", rows, {})
    train_window(
        hidden=[tmp_path / "shard"],
        held_out=[],
        previous=None,
        output=tmp_path / "drafter",
        journal=tmp_path / "journal",
        shape=drafter.shape,
        target=SIZES,
        embed=target.get_input_embeddings().weight,
        head=target.get_output_embeddings().weight,
        config=TrainConfig(epochs=15, anchors=8, batch_rows=8, learning_rate=3e-3),
        device=CPU,
        provenance={},
    )
    before = run(drafter)["drafter"]
    after = run(load_drafter(tmp_path / "drafter", torch.float32, CPU))["drafter"]
    assert after["acceptance_length"]["mean"] > before["acceptance_length"]["mean"] + 0.3
    assert after["saved_share"]["mean"] > before["saved_share"]["mean"] + 0.1
