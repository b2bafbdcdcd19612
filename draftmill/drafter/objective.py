"""The training objective: which positions are anchors, what their slots should say, and how much each counts.

An anchor is a token that the target generated and whose successor it generated too, for only such tokens can be the
last verified token of a decoding step with something to predict behind it. Slot k of a block predicts the token at
anchor + k itself (no shift); slot 0 is the anchor and is never scored.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from draftmill.drafter.head import token_losses

Loss = Literal["cross_entropy", "dpace"]

# (block size, gamma) as published for DFlash; see default_decay.
_DECAYS = ((8, 4.0), (10, 5.0), (16, 7.0))
_DPACE_ALPHA = 0.5


def default_decay(block_size: int) -> float:
    """Gamma of the position weight by block size: 4, 5 and 7 for 8, 10 and 16.

    Between these it is linear, above it goes on with the last slope, below it is half the block size.
    """
    if block_size < _DECAYS[0][0]:
        return block_size / 2
    pairs = list(itertools.pairwise(_DECAYS))
    (low, start), (high, end) = next((p for p in pairs if block_size <= p[1][0]), pairs[-1])
    return start + (block_size - low) * (end - start) / (high - low)


def eligible_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """Boolean [..., tokens]: positions that may be anchors, being scored and followed by a scored token."""
    mask = loss_mask.bool()
    following = torch.zeros_like(mask)
    following[..., :-1] = mask[..., 1:]
    return mask & following


def sample_anchors(loss_mask: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Up to `count` anchors of one row [tokens], drawn without replacement, rising. Empty if none is eligible."""
    eligible = eligible_anchors(loss_mask).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return eligible[chosen].sort().values


def pad_anchors(anchors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of several rows as [rows, blocks] and which of them are real; padding anchors are 0."""
    longest = max(1, *(len(row) for row in anchors)) if anchors else 1
    padded = torch.zeros(len(anchors), longest, dtype=torch.int64)
    valid = torch.zeros(len(anchors), longest, dtype=torch.bool)
    for index, row in enumerate(anchors):
        padded[index, : len(row)] = row
        valid[index, : len(row)] = True
    return padded, valid


@dataclass(frozen=True, slots=True)
class Targets:
    """What the slots of blocks should say: `labels` int64 and `weights` float32, both [rows, blocks, block_size].

    A weight of zero means that the slot is not scored; its label is then meaningless.
    """

    labels: torch.Tensor
    weights: torch.Tensor


def block_targets(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    size: int,
    decay: float,
) -> Targets:
    """Labels and weights for anchors [rows, blocks] of rows [rows, tokens], padded with loss mask 0.

    The weight of slot k is exp(-(k - 1) / decay) where the block is valid, k > 0, and the token at anchor + k exists
    and is scored.
    """
    tokens = input_ids.shape[1]
    slot = torch.arange(size, device=anchors.device)
    positions = anchors[..., None] + slot
    inside = (positions < tokens) & (slot > 0) & valid[..., None]
    flat = positions.clamp(max=tokens - 1).flatten(1)
    labels = input_ids.gather(1, flat).view_as(positions)
    scored = loss_mask.bool().gather(1, flat).view_as(positions) & inside
    return Targets(labels, scored * torch.exp(-(slot - 1).clamp(min=0) / decay))


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """The weighted sum of a batch's losses, and counts by slot [block_size], all to be added up over batches and ranks.

    `scored` and `correct` count slots; `reached` counts blocks whose slots up to this one are all right, which is what
    greedy verification accepts. Slot 0 is the anchor and counts nothing.
    """

    total: torch.Tensor
    scored: torch.Tensor
    correct: torch.Tensor
    reached: torch.Tensor


def normaliser(targets: Targets, loss: Loss) -> float:
    """What a sum of losses is divided by: the sum of weights, or for D-PACE the number of blocks.

    It is known before any forward, so that a step may be split over batches and ranks without changing its gradient.
    """
    if loss == "dpace":
        return float((targets.weights > 0).any(-1).sum())
    return float(targets.weights.sum())


def block_loss(states: torch.Tensor, head: torch.Tensor, targets: Targets, loss: Loss, chunk: int = 1024) -> BlockLoss:
    """Score block states [rows, blocks, block_size, width] against the frozen head [vocabulary, width].

    Only slots with a weight are projected, `chunk` at a time.
    """
    scored = targets.weights > 0
    losses, right = token_losses(states[scored], head, targets.labels[scored], chunk)
    weights = targets.weights
    if loss == "dpace":
        weights = dpace_weights(torch.zeros_like(weights).masked_scatter(scored, losses.detach()), scored)
    hits = torch.zeros_like(scored).masked_scatter(scored, right)
    prefix = hits[..., 1:].cumprod(-1).sum((0, 1))
    return BlockLoss(
        total=(weights[scored] * losses).sum(),
        scored=scored.sum((0, 1)),
        correct=hits.sum((0, 1)),
        reached=torch.cat([prefix.new_zeros(1), prefix]),
    )


def dpace_weights(losses: torch.Tensor, scored: torch.Tensor, alpha: float = _DPACE_ALPHA) -> torch.Tensor:
    """D-PACE's weights (arXiv 2605.18810) from cross entropies [..., block_size] and which slots are scored.

    With q = exp(-loss) smoothed to (1 - alpha) q + alpha, the weight of slot j is the sum over m >= j of the product of
    q over slots up to m: how many accepted tokens depend on it. An unscored slot ends its block. No gradient.
    """
    smoothed = (1 - alpha) * torch.exp(-losses.detach()) + alpha
    reach = torch.where(scored, smoothed, 0.0)[..., 1:].cumprod(-1)
    weights = reach.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([torch.zeros_like(weights[..., :1]), weights], dim=-1)


def schedule(progress: float, warmup: float, peak: float, least: float) -> float:
    """Learning rate at a share of the run in [0, 1]: a linear rise over `warmup`, then a cosine from peak to least."""
    if progress < warmup:
        return peak * progress / warmup
    done = (progress - warmup) / (1 - warmup)
    return least + (peak - least) * 0.5 * (1 + math.cos(math.pi * done))
