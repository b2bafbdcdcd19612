"""One optimiser step and one held-out pass: everything that touches gradients, nothing that touches files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from draftmill.config import TrainConfig
from draftmill.drafter import ranks
from draftmill.drafter.data import Batch, Rows, split_steps
from draftmill.drafter.model import Drafter, block_ids
from draftmill.drafter.objective import BlockLoss, Targets, block_loss, block_targets, default_decay, normaliser
from draftmill.drafter.optimizer import MasterAdamW
from draftmill.drafter.tally import Tally

# Held-out blocks are drawn once and for all, so that epochs can be compared.
_HELD_OUT_EPOCH = -1


class Trainer:
    """A drafter in training between a frozen embedding and head, both [vocabulary, width].

    The drafter is bfloat16 on cuda and float32 elsewhere; embedding and head follow it.
    """

    def __init__(
        self, drafter: Drafter, embed: torch.Tensor, head: torch.Tensor, config: TrainConfig, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.drafter = drafter.to(device, torch.float32)
        self._config, self._device = config, device
        # Made while the drafter is still float32, so that masters start unrounded.
        self.optimizer = MasterAdamW(self.drafter, config.betas, config.weight_decay, dtype)
        self._embed = embed.to(device, dtype)
        self._head = self._embed if head is embed else head.to(device, dtype)
        self._decay = config.loss_decay or default_decay(drafter.shape.block_size)

    def step(self, rows: Rows, numbers: Sequence[int], epoch: int, learning_rate: float) -> Tally:
        """Take one step on this rank's rows of a batch and return what all ranks' rows scored."""
        work = [(batch, self._targets(batch)) for batch in self._batches(rows, numbers, epoch)]
        weight = self._weight([targets for _, targets in work])
        parts = []
        for batch, targets in work:
            loss = self._loss(batch, targets)
            (loss.total / weight).backward()  # type: ignore[no-untyped-call]
            parts.append(loss)
        ranks.add_up(self.optimizer.gradients())
        self.optimizer.step(learning_rate, self._config.clip_norm)
        return Tally.of(parts, weight, self.drafter.shape.block_size, self._device)

    @torch.no_grad()
    def held_out(self, rows: Rows) -> Tally:
        """Score held-out rows, the same blocks whenever it is called."""
        tally = Tally.empty(self.drafter.shape.block_size)
        for numbers in split_steps(range(len(rows)), self._config.batch_rows, ranks.rank(), ranks.ranks()):
            work = [(batch, self._targets(batch)) for batch in self._batches(rows, numbers, _HELD_OUT_EPOCH)]
            weight = self._weight([targets for _, targets in work])
            parts = [self._loss(batch, targets) for batch, targets in work]
            tally.add(Tally.of(parts, weight, self.drafter.shape.block_size, self._device))
        return tally

    def _batches(self, rows: Rows, numbers: Sequence[int], epoch: int) -> Iterator[Batch]:
        size = self._config.micro_batch_rows or self._config.batch_rows
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            yield rows.batch(part, self._config.anchors, self._config.seed, epoch).to(self._device)

    def _targets(self, batch: Batch) -> Targets:
        size = self.drafter.shape.block_size
        return block_targets(batch.input_ids, batch.loss_mask, batch.anchors, batch.valid, size, self._decay)

    def _weight(self, targets: Sequence[Targets]) -> float:
        own = sum(normaliser(part, self._config.loss) for part in targets)
        total = torch.tensor([own], dtype=torch.float64, device=self._device)
        ranks.add_up([total])
        return float(total)

    def _loss(self, batch: Batch, targets: Targets) -> BlockLoss:
        ids = block_ids(batch.input_ids.gather(1, batch.anchors), self.drafter.shape)
        states = self.drafter(batch.taps, F.embedding(ids, self._embed), batch.anchors)
        return block_loss(states, self._head, targets, self._config.loss)
