"""The in-process engine: batched `generate` of transformers, for the demo and for targets that fit beside it.

Rows of one sampling are sorted by prompt length and cut into batches by the shard alone; a batch of which any row is
missing is run whole. Each row draws from its own random generator, so on a CPU the same shard always gives the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from draftmill.config import GenerateConfig
from draftmill.engines.base import Failure, Key, Request, Result, Sampling


class RowSampler:
    """A logits processor that turns greedy search into sampling with one random generator a row.

    The filtered logits plus independent Gumbel noise have their maximum at a token with just that token's probability
    (the Gumbel-max trick, Gumbel 1954; Maddison, Tarlow and Minka, arXiv 1411.0030), so that `argmax` is a sample.
    With top-k only the k best logits go through the other filters, which would sort the whole vocabulary otherwise.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling, device: torch.device) -> None:
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._top_k = sampling.top_k
        self._filters: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._filters.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocabulary] of which one a row is finite: the sample."""
        width = min(self._top_k or scores.shape[-1], scores.shape[-1])
        best, ids = scores.topk(width, dim=-1) if self._top_k else (scores, None)
        for narrow in self._filters:
            best = narrow(input_ids, best)
        noise = torch.stack([torch.empty_like(best[0]).exponential_(generator=g) for g in self._generators])
        # Some processors' generators give an exact 0, whose infinite noise would undo a filter.
        noise.clamp_(min=torch.finfo(noise.dtype).tiny)
        chosen = (best - noise.log()).argmax(-1, keepdim=True)
        if ids is not None:
            chosen = ids.gather(-1, chosen)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


class TransformersEngine:
    """Generates with a loaded causal language model."""

    def __init__(self, model: Any, stop_ids: Sequence[int], sampling: GenerateConfig) -> None:
        from transformers import GenerationConfig

        self._model, self._stop, self._batch = model, frozenset(stop_ids), sampling.batch_size
        # generate() fills gaps of a given config from the model's own, so the model's is replaced whole.
        self._pad = min(self._stop)
        model.generation_config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=list(stop_ids), pad_token_id=self._pad
        )

    def run(self, requests: Sequence[Request], done: Collection[Key]) -> Iterator[Result | Failure]:
        """Answer the rows not in `done`, batch by batch (engines/base.py)."""
        ordered = sorted(requests, key=lambda request: (-len(request.prompt_ids), request.key))
        groups: dict[Sampling, list[Request]] = {}
        for request in ordered:
            groups.setdefault(request.sampling, []).append(request)
        for sampling, group in groups.items():
            for start in range(0, len(group), self._batch):
                batch = group[start : start + self._batch]
                if any(request.key not in done for request in batch):
                    yield from (result for result in self._answer(batch, sampling) if result.key not in done)

    @torch.inference_mode()
    def _answer(self, batch: Sequence[Request], sampling: Sampling) -> list[Result]:
        from transformers import LogitsProcessorList

        device = self._model.device
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), self._pad, device=device)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids, device=device)
            mask[row, width - len(request.prompt_ids) :] = 1
        processors = LogitsProcessorList()
        if sampling.temperature > 0:
            processors.append(RowSampler([request.seed for request in batch], sampling, device))
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=processors,
            max_new_tokens=sampling.max_new_tokens,
        )
        return [self._result(request, row[width:].tolist()) for request, row in zip(batch, output, strict=True)]

    def _result(self, request: Request, ids: list[int]) -> Result:
        for position, token in enumerate(ids):
            if token in self._stop:
                return Result(request.key, tuple(ids[: position + 1]), "stop")
        return Result(request.key, tuple(ids), "length")
