"""Running sums of what blocks score; plain numbers, so that they survive a kill in the journal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftmill.drafter import ranks
from draftmill.drafter.objective import BlockLoss


@dataclass(slots=True)
class Tally:
    """Sums over blocks; the lists have one entry a slot of a block, slot 0 counting nothing."""

    loss: float
    weight: float
    scored: list[int]
    correct: list[int]
    reached: list[int]

    @classmethod
    def empty(cls, block_size: int) -> Tally:
        """Nothing counted yet."""
        return cls(0.0, 0.0, [0] * block_size, [0] * block_size, [0] * block_size)

    @classmethod
    def of(cls, parts: list[BlockLoss], weight: float, block_size: int, device: torch.device) -> Tally:
        """The sum of some batches over all ranks; `weight` is their normaliser, already added up."""
        loss = torch.zeros(1, dtype=torch.float64, device=device)
        counts = torch.zeros(3, block_size, dtype=torch.int64, device=device)
        for part in parts:
            loss += part.total.detach().double()
            counts += torch.stack([part.scored, part.correct, part.reached])
        ranks.add_up([loss, counts])
        return cls(float(loss), weight, *counts.tolist())

    def add(self, other: Tally) -> None:
        """Add another's sums to these."""
        self.loss += other.loss
        self.weight += other.weight
        for mine, theirs in zip(self._counts(), other._counts(), strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        return self.scored, self.correct, self.reached

    def state(self) -> dict[str, Any]:
        """All sums as JSON values."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Mean loss, accuracy overall and by slot 1, 2, ..., and the mean number of leading slots that are right.

        The last is the acceptance a greedy verification of these very blocks would give (without its bonus token);
        blocks that the end of a row cuts short count as they are.
        """
        share = [right / max(seen, 1) for right, seen in zip(self.correct, self.scored, strict=True)]
        return {
            "loss": self.loss / max(self.weight, 1e-12),
            "accuracy": sum(self.correct) / max(sum(self.scored), 1),
            "accuracy_by_position": share[1:],
            "accepted": sum(self.reached) / max(self.scored[1], 1),
            "blocks": self.scored[1],
        }
