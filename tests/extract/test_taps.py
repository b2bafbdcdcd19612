"""Taps against transformers' own hidden states, rows that stay apart in a pack, and a pass that ends at the last tap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.stages.extract import canary_rows, packs
from draftmill.target.model import Tapped, decoder_layers
from tests.extract.conftest import alone, ids_of, make_model

LENGTHS = [1, 7, 1, 64, 3, 20, 1]


def rows_of(lengths):
    return [ids_of(length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("taps", [[0], [3], [0, 1, 2, 3], [1, 3]])
def test_every_tap_of_every_row_is_that_layers_output(model, taps):
    rows = rows_of(LENGTHS)
    tapped = Tapped(model, taps)
    for row, found in zip(rows, tapped.states(rows), strict=True):
        expected = alone(model, row, taps)
        assert found.shape == (len(row), len(taps), 32)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_each_attention_keeps_rows_apart(kind, attention):
    model = make_model(kind, attention=attention)
    rows = rows_of([5, 1, 9])
    for row, found in zip(rows, Tapped(model, [1, 3]).states(rows), strict=True):
        torch.testing.assert_close(found, alone(model, row, [1, 3]), atol=2e-5, rtol=1e-4)


def test_sliding_windows_stay_inside_their_row():
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    model = make_model("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0, layer_types=kinds)
    rows = rows_of([9, 1, 12])
    tapped = Tapped(model, [0, 3])
    assert tapped.isolates_rows
    for row, found in zip(rows, tapped.states(rows), strict=True):
        torch.testing.assert_close(found, alone(model, row, [0, 3]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_every_token_points_the_same_way(kind):
    model = make_model(kind).bfloat16()
    rows = rows_of(LENGTHS)
    for row, found in zip(rows, Tapped(model, [0, 2, 3]).states(rows), strict=True):
        cosine = torch.cosine_similarity(found.float(), alone(model, row, [0, 2, 3]).float(), dim=-1)
        assert found.dtype == torch.bfloat16
        assert cosine.min() > 0.995
        assert cosine.mean() > 0.9995


def test_a_shift_by_one_layer_or_token_would_show(model):
    """The comparison above can fail: neighbours are far apart."""
    row = ids_of(20)
    (found,) = Tapped(model, [1]).states([row])
    assert torch.cosine_similarity(found, alone(model, row, [2]), dim=-1).mean() < 0.98
    assert torch.cosine_similarity(found[1:], alone(model, row, [1])[:-1], dim=-1).mean() < 0.9


def test_a_row_is_the_same_whatever_its_neighbours_are(model):
    tapped = Tapped(model, [0, 3])
    middle = ids_of(6, 50)
    one = tapped.states([ids_of(5, 1), middle, ids_of(7, 2)])[1]
    other = tapped.states([ids_of(5, 3), middle, ids_of(7, 4)])[1]
    assert torch.equal(one, other)


def test_the_pass_ends_at_the_last_tap(model):
    ran = []
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(decoder_layers(model))
    ]
    handles.append(model.lm_head.register_forward_pre_hook(lambda *_: ran.append("head")))
    try:
        Tapped(model, [0, 2]).states([ids_of(4)])
        assert ran == [0, 1, 2]
        ran.clear()
        Tapped(model, [0, 2]).states_and_logits(ids_of(4))
        assert ran == [0, 1, 2, 3, 4, "head"]
    finally:
        for handle in handles:
            handle.remove()


def test_no_hook_stays_behind(model):
    def hooks():
        return [list(layer._forward_hooks) for layer in decoder_layers(model)]

    before = hooks()
    tapped = Tapped(model, [0, 2])
    tapped.states([ids_of(4)])
    tapped.states_and_logits(ids_of(4))
    with pytest.raises(IndexError):
        tapped.states([[999]])
    assert hooks() == before


def test_a_row_alone_gives_its_taps_and_logits(model):
    row = ids_of(9)
    states, logits = Tapped(model, [1, 3]).states_and_logits(row)
    torch.testing.assert_close(states, alone(model, row, [1, 3]), atol=2e-5, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([row])).logits[0])
    assert logits.dtype == torch.float32


def test_a_model_that_carries_state_across_rows_takes_them_one_at_a_time(model, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(model.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
        tapped = Tapped(model, [0, 2])
    assert not tapped.isolates_rows
    with pytest.raises(ValueError, match="one at a time"):
        tapped.states([[1], [2]])
    assert len(tapped.states([[1, 2]])) == 1


def test_a_model_without_one_list_of_layers_is_refused():
    model = make_model()
    model.twin = torch.nn.ModuleList(torch.nn.Identity() for _ in range(5))
    with pytest.raises(UserError) as caught:
        Tapped(model, [0])
    assert str(caught.value) == ("target.model: LlamaForCausalLM does not hold its 5 decoder layers in one list.")


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 50))
def test_packs_keep_the_order_and_the_limit_and_waste_no_room(lengths, limit):
    groups = list(packs(lengths, limit))
    assert [row for group in groups for row in group] == list(range(len(lengths)))
    assert all(groups)
    sizes = [sum(lengths[row] for row in group) for group in groups]
    assert all(size <= limit or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    following = [lengths[group[0]] for group in groups[1:]]
    assert all(size + first > limit for size, first in zip(sizes, following, strict=False))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 40))
def test_canaries_are_spread_and_hold_the_shortest_row(lengths, count):
    chosen = canary_rows(lengths, count)
    assert chosen == sorted(set(chosen))
    assert all(0 <= row < len(lengths) for row in chosen)
    assert lengths.index(min(lengths)) in chosen
    assert min(count, len(lengths)) <= len(chosen) <= count + 1
