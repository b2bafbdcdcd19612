"""The objective by hand: anchors, labels, weights, losses, gradients."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from draftmill.drafter.head import token_losses
from draftmill.drafter.objective import (
    block_loss,
    block_targets,
    default_decay,
    dpace_weights,
    eligible_anchors,
    normaliser,
    pad_anchors,
    sample_anchors,
    schedule,
)

# One row: a prompt of 3, six generated tokens.
IDS = torch.tensor([[10, 11, 12, 20, 21, 22, 23, 24, 25]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])


def targets(anchors, valid=None, size=4, decay=2.0, ids=IDS, mask=MASK):
    anchors = torch.tensor(anchors)
    valid = torch.ones_like(anchors, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return block_targets(ids, mask, anchors, valid, size, decay)


def test_decay_is_the_published_one_and_rises_between():
    assert [default_decay(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert default_decay(4) == 2.0
    assert default_decay(13) == pytest.approx(6.0)
    assert default_decay(22) == pytest.approx(9.0)


def test_anchors_are_generated_tokens_followed_by_one():
    assert eligible_anchors(MASK)[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7]
    holes = torch.tensor([1, 1, 0, 1, 0, 1, 1])
    assert eligible_anchors(holes).nonzero()[:, 0].tolist() == [0, 5]


@given(mask=st.lists(st.integers(0, 1), min_size=1, max_size=30), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_sampled_anchors_are_distinct_rising_eligible_and_repeatable(mask, count, seed):
    mask = torch.tensor(mask)
    anchors = sample_anchors(mask, count, seed)
    possible = eligible_anchors(mask).nonzero()[:, 0].tolist()
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    assert set(anchors.tolist()) <= set(possible)
    assert len(anchors) == min(count, len(possible))
    assert torch.equal(anchors, sample_anchors(mask, count, seed))


def test_every_eligible_position_is_sampled_sooner_or_later():
    seen = {int(a) for seed in range(40) for a in sample_anchors(MASK[0], 2, seed)}
    assert seen == {3, 4, 5, 6, 7}


def test_anchors_are_padded_and_marked():
    anchors, valid = pad_anchors([torch.tensor([4, 6]), torch.tensor([5])])
    assert anchors.tolist() == [[4, 6], [5, 0]]
    assert valid.tolist() == [[True, True], [True, False]]
    assert pad_anchors([torch.tensor([], dtype=torch.int64)])[1].tolist() == [[False]]


def test_labels_and_weights_by_hand():
    found = targets([[3, 6, 7]])
    assert found.labels[0, 0].tolist() == [20, 21, 22, 23]
    assert found.labels[0, 1, :3].tolist() == [23, 24, 25]
    full = [0.0, 1.0, math.exp(-1 / 2), math.exp(-2 / 2)]
    torch.testing.assert_close(found.weights[0, 0], torch.tensor(full))
    torch.testing.assert_close(found.weights[0, 1], torch.tensor([*full[:3], 0.0]))
    torch.testing.assert_close(found.weights[0, 2], torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_invalid_blocks_and_unscored_tokens_weigh_nothing():
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 1]])
    found = targets([[3, 3]], valid=[[True, False]], mask=mask)
    assert (found.weights[0, 0] > 0).tolist() == [False, True, False, True]
    assert not found.weights[0, 1].any()


def test_the_normaliser_is_the_weights_or_the_blocks():
    found = targets([[3, 7, 0]], valid=[[True, True, False]])
    full = 1 + math.exp(-1 / 2) + math.exp(-2 / 2)
    assert normaliser(found, "cross_entropy") == pytest.approx(full + 1)
    assert normaliser(found, "dpace") == 2


def test_dpace_weights_by_hand():
    losses = torch.tensor([[9.0, 0.0, math.log(2), math.log(4)]])
    scored = torch.tensor([[False, True, True, True]])
    # Smoothed with 1/2: q = 1, 3/4, 5/8; reach 1, 3/4, 15/32.
    expected = [0.0, 1 + 3 / 4 + 15 / 32, 3 / 4 + 15 / 32, 15 / 32]
    torch.testing.assert_close(dpace_weights(losses, scored), torch.tensor([expected]))
    hole = dpace_weights(losses, torch.tensor([[False, True, False, True]]))
    torch.testing.assert_close(hole, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


@given(chunk=st.integers(1, 9), count=st.integers(1, 8), seed=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_the_frozen_head_gives_cross_entropy_and_its_gradient(chunk, count, seed):
    generator = torch.Generator().manual_seed(seed)
    states = (3 * torch.randn(count, 6, generator=generator)).requires_grad_()
    head, labels = torch.randn(11, 6, generator=generator), torch.randint(0, 11, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    losses, right = token_losses(states, head, labels, chunk)
    (losses * weights).sum().backward()
    plain = states.detach().clone().requires_grad_()
    expected = F.cross_entropy(plain @ head.T, labels, reduction="none")
    (expected * weights).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(states.grad, plain.grad)
    assert torch.equal(right, (plain @ head.T).argmax(-1) == labels)


def test_the_head_survives_logits_that_overflow_an_exponential():
    states = torch.tensor([[200.0, 0.0]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    losses, _ = token_losses(states, head, torch.tensor([1]), 4)
    losses.sum().backward()
    assert losses.item() == pytest.approx(400.0)
    assert torch.isfinite(states.grad).all()


@pytest.mark.parametrize("loss", ["cross_entropy", "dpace"])
def test_block_loss_is_the_weighted_sum_and_counts_by_slot(loss):
    generator = torch.Generator().manual_seed(3)
    found = targets([[3, 6, 0]], valid=[[True, True, False]])
    states, head = torch.randn(1, 3, 4, 6, generator=generator), torch.randn(40, 6, generator=generator)
    # Make two slots of the first block right, and the third wrong.
    states[0, 0, 1], states[0, 0, 2] = 50 * head[21] / head[21].norm(), 50 * head[22] / head[22].norm()
    best = (states @ head.T).argmax(-1)
    result = block_loss(states, head, found, loss)
    each = F.cross_entropy((states @ head.T)[0].flatten(0, 1), found.labels.flatten(), reduction="none").view(1, 3, 4)
    weights = found.weights if loss == "cross_entropy" else dpace_weights(each, found.weights > 0)
    torch.testing.assert_close(result.total, (each * weights).sum(), rtol=1e-4, atol=1e-4)
    right = (best == found.labels) & (found.weights > 0)
    assert result.scored.tolist() == [0, 2, 2, 1]
    assert result.correct.tolist() == right.sum((0, 1)).tolist()
    assert result.reached.tolist() == [0, *right[..., 1:].int().cumprod(-1).sum((0, 1)).tolist()]
    assert result.reached[2] >= 1


def test_the_schedule_rises_then_falls_to_its_end():
    rates = [schedule(share / 100, 0.1, 1.0, 0.2) for share in range(101)]
    assert rates[5] == pytest.approx(0.5)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert schedule(0.0, 0.0, 1.0, 0.0) == 1.0
