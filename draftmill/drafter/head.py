"""Cross entropy over the frozen head without ever holding all logits.

The head is not trained, so the derivative of a token's loss by its state is known in the forward pass: the expected
head row minus the label's. It is computed there chunk by chunk and kept in place of the logits, [tokens, width] instead
of [tokens, vocabulary], and the backward pass only scales it. That is one product with the head less than recomputing
logits, which on a CPU is a third of all training time.
"""

from __future__ import annotations

from typing import Any

import torch


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, states: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty(len(states), dtype=torch.float32, device=states.device)
        right = torch.empty(len(states), dtype=torch.bool, device=states.device)
        slopes = torch.empty_like(states)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            losses[part], right[part], slopes[part] = _chunk(states[part], head, labels[part])
        context.save_for_backward(slopes)
        context.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(context: Any, by_loss: torch.Tensor, _by_right: Any) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = context.saved_tensors
        return (by_loss[:, None] * slopes).to(slopes.dtype), None, None, None


def _chunk(
    states: torch.Tensor, head: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = (states @ head.T).float()
    best, place = logits.max(-1, keepdim=True)
    of_label = logits.gather(1, labels[:, None])
    # Written out, because torch.logsumexp on a CPU takes longer than the product before it.
    chances = logits.sub_(best).exp_()
    total = chances.sum(-1, keepdim=True)
    losses = (total.log() + best - of_label)[:, 0]
    slopes = (chances.to(head.dtype) @ head) / total.to(head.dtype) - head[labels]
    return losses, place[:, 0] == labels, slopes


def token_losses(
    states: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy float32 [tokens] and whether the best token is the label [tokens].

    `states` [tokens, width] and `head` [vocabulary, width] share a dtype, `labels` is int64 [tokens]; `chunk` tokens
    are projected at a time. Gradients reach the states only.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _FrozenHeadLoss.apply(states, head, labels, chunk)  # type: ignore[no-untyped-call]
    return result
