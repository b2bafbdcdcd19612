"""Decoding in blocks gives the target's own text, whatever is proposed and whatever cache the target has."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3_5TextConfig, Qwen3Config

from draftmill.drafter.decode import DrafterProposer, LookupProposer, decode, greedy

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "head_dim": 8,
}
TARGETS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "sliding window": lambda: MistralConfig(**SIZES, sliding_window=7),
    "recurrent": lambda: Qwen3_5TextConfig(
        **SIZES,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    ),
}
LIMIT = 24


@functools.cache
def target_of(name):
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(TARGETS[name]()).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            # Fresh weights are so small that every text is one token over and over.
            weight.mul_(4)
    return model


@functools.cache
def alone(name, prompt, limit=LIMIT, stop=()):
    return greedy(target_of(name), prompt, limit, stop)


class Oracle:
    """Knows the answer and misleads at the given positions; remembers what it was told."""

    def __init__(self, prompt, answer, wrong, size=5, taps=(1, 5)):
        self.text, self.wrong, self.size, self.taps = [*prompt, *answer], wrong, size, taps
        self.tokens, self.states = [], []

    def observe(self, tokens, states):
        self.tokens += tokens
        self.states.append(states)

    def propose(self, anchor):
        start = len(self.tokens) + 1
        true = [*self.text, 0, 1, 2, 3, 4, 5, 6][start : start + self.size]
        return [(token + 1) % 50 if start + k in self.wrong else token for k, token in enumerate(true)]


@pytest.mark.parametrize("name", TARGETS)
@given(
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=12).map(tuple),
    wrong=st.sets(st.integers(0, 40), max_size=12),
    limit=st.integers(1, LIMIT),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_text_is_the_targets_whatever_is_proposed(name, prompt, wrong, limit):
    expected = alone(name, prompt).tokens[:limit]
    oracle = Oracle(prompt, alone(name, prompt).tokens, wrong)
    decoded = decode(target_of(name), oracle, prompt, limit, ())
    assert decoded.tokens == expected
    assert sum(decoded.accepted) + len(decoded.accepted) + 1 - len(expected) in (0, 1)
    if not wrong:
        assert decoded.forwards == 1 + -(-(limit - 1) // 6) or decoded.forwards == 1 + -(-(limit - 2) // 6)


@pytest.mark.parametrize("name", TARGETS)
def test_a_proposer_sees_every_verified_token_once_with_its_states(name):
    """The caches after crops and replays hold what a single forward over the whole text would."""
    prompt = (5, 6, 7)
    answer = alone(name, prompt).tokens
    oracle = Oracle(prompt, answer, wrong={5, 6, 12, 20, 21, 22})
    decode(target_of(name), oracle, prompt, LIMIT, ())
    text = [*prompt, *answer]
    assert oracle.tokens == text[: len(oracle.tokens)]
    assert len(oracle.tokens) >= len(text) - 1
    whole = target_of(name)(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.stack([whole[tap + 1][0] for tap in oracle.taps], 1)[: len(oracle.tokens)]
    torch.testing.assert_close(torch.cat(oracle.states), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_random_drafter_and_the_lookup_keep_the_text(name, length, make_drafter):
    target, prompt = target_of(name), tuple(range(10, 10 + length))
    drafter = make_drafter(block_size=6, sliding_layers=1, sliding_window=4)
    for proposer in (DrafterProposer(drafter, target), LookupProposer(4, ())):
        assert decode(target, proposer, prompt, LIMIT, ()).tokens == alone(name, prompt).tokens


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_ends_the_text_wherever_it_stands_in_a_block(place):
    prompt = (5, 6, 7)
    answer = alone("qwen3", prompt).tokens
    stop = frozenset({answer[place]})
    expected = answer[: answer.index(answer[place]) + 1]
    for wrong in ({}, {len(prompt) + place}, {len(prompt) + place + 1}):
        decoded = decode(target_of("qwen3"), Oracle(prompt, answer, wrong), prompt, LIMIT, stop)
        assert decoded.tokens == expected
        assert alone("qwen3", prompt, LIMIT, stop).tokens == expected


def test_an_answer_of_one_token_takes_one_forward():
    prompt = (5, 6, 7)
    answer = alone("llama", prompt).tokens
    for limit, stop in ((1, ()), (LIMIT, {answer[0]})):
        decoded = decode(target_of("llama"), Oracle(prompt, answer, set()), prompt, limit, stop)
        assert (decoded.tokens, decoded.accepted, decoded.forwards) == (answer[:1], [], 1)


@pytest.mark.parametrize(("prompt", "limit"), [((), 4), ((1,), 0)])
def test_nothing_to_decode_is_refused(prompt, limit):
    with pytest.raises(ValueError, match="at least one token"):
        decode(target_of("llama"), LookupProposer(3, ()), prompt, limit, ())


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_lookup_is_that_of_transformers(name):
    """As many forwards as generate() takes, but for the prompt's, which proposes nothing here."""
    target, prompt = target_of(name), (5, 6, 7, 5, 6, 7, 5)
    calls = []
    hook = target.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.tensor([prompt])
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LIMIT,
        prompt_lookup_num_tokens=4,
        eos_token_id=[49],
        pad_token_id=0,
    )
    hook.remove()
    decoded = decode(target, LookupProposer(4, {49}), prompt, LIMIT, {49})
    assert decoded.tokens == output[0, len(prompt) :].tolist() == alone(name, prompt, LIMIT, frozenset({49})).tokens
    assert 0 <= decoded.forwards - len(calls) <= 1


def test_gaps_are_between_the_two_best_logits():
    prompt = (5, 6, 7)
    found = alone("llama", prompt)
    logits = target_of("llama")(input_ids=torch.tensor([[*prompt, *found.tokens]])).logits[0, 2:-1]
    best = logits.topk(2).values
    torch.testing.assert_close(torch.tensor(found.gaps), best[:, 0] - best[:, 1], atol=1e-3, rtol=1e-3)
