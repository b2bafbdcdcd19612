"""Who sees whom: the one definition of DFlash attention visibility.

A block at anchor position a sees the context of its own row strictly before a (the target's states of the anchor itself
are not known when a block is drafted) and its own slots. Full layers are bidirectional inside the block; sliding layers
are causal there, and see a key only if it is less than `window` positions behind the query.
"""

from __future__ import annotations

import torch


def row_mask(anchors: torch.Tensor, tokens: int, size: int, window: int | None) -> torch.Tensor:
    """Visibility for training, boolean [rows, 1, blocks * size, tokens + blocks * size].

    `anchors` [rows, blocks] are positions; keys are a row's `tokens` context positions, then the slots of all blocks.
    """
    rows, count = anchors.shape
    device = anchors.device
    query = (anchors[..., None] + torch.arange(size, device=device)).flatten(1)
    key = torch.arange(tokens, device=device)
    anchor = anchors.repeat_interleave(size, dim=1)
    context = key < anchor[..., None]
    owner = torch.arange(count, device=device).repeat_interleave(size)
    block = (owner[:, None] == owner).expand(rows, -1, -1)
    if window is not None:
        context = context & (query[..., None] - key < window)
        block = block & _causal_within(query[..., None] - query[:, None, :], window)
    return torch.cat([context, block], dim=-1).unsqueeze(1)


def block_mask(start: int, size: int, window: int, device: torch.device) -> torch.Tensor:
    """Visibility of one block behind a context of `start` tokens in a sliding layer, [1, 1, size, start + size]."""
    query = torch.arange(start, start + size, device=device)
    key = torch.arange(start + size, device=device)
    return _causal_within(query[:, None] - key, window)[None, None]


def _causal_within(distance: torch.Tensor, window: int) -> torch.Tensor:
    return (distance >= 0) & (distance < window)
