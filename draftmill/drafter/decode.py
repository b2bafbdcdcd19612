"""Speculative decoding with exact greedy verification: something proposes, the target verifies, the text stays its own.

A proposal is accepted exactly when it is the token that the target would have chosen, and the first that is not is
replaced by that token. One loop serves every proposer, so that a drafter and the lookup baseline are counted alike.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from draftmill.drafter.model import ContextCache, Drafter, block_ids


@dataclass(frozen=True, slots=True)
class Greedy:
    """The target's own greedy answer: `tokens`, and for each the gap between the two best logits."""

    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer decoded in blocks.

    The first of its `tokens` came with the prompt's own forward; `accepted` is how many proposals each later forward
    of the target had accepted, so there are 1 + len(accepted) forwards.
    """

    tokens: list[int]
    accepted: list[int]

    @property
    def forwards(self) -> int:
        """How often the target ran, the prompt included."""
        return 1 + len(self.accepted)


class Proposer(Protocol):
    """Guesses how a text goes on. `taps` are the target layers whose states it wants to see, maybe none."""

    taps: Sequence[int]

    def observe(self, tokens: Sequence[int], states: torch.Tensor | None) -> None:
        """Learn verified tokens, in order, with their tapped states [tokens, taps, width]."""

    def propose(self, anchor: int) -> list[int]:
        """Guess the tokens after the newest one, `anchor`, which was not observed yet."""


class DrafterProposer:
    """A DFlash drafter behind one text, with the embedding and head of its target."""

    def __init__(self, drafter: Drafter, target: Any) -> None:
        self.taps: Sequence[int] = drafter.shape.taps
        self._drafter = drafter
        self._embed = target.get_input_embeddings().weight
        self._head = target.get_output_embeddings().weight
        self._cache = ContextCache(drafter.shape.num_layers)

    def observe(self, tokens: Sequence[int], states: torch.Tensor | None) -> None:
        """Add the states of verified tokens to the drafter's context."""
        if states is None or len(states) != len(tokens):
            raise ValueError("a drafter needs the tapped states of every verified token")
        self._drafter.extend(self._cache, states)

    def propose(self, anchor: int) -> list[int]:
        """The best token of each masked slot."""
        ids = block_ids(torch.tensor(anchor, device=self._embed.device), self._drafter.shape)
        states = self._drafter.propose(self._cache, F.embedding(ids, self._embed))
        proposals: list[int] = (states[1:].to(self._head.dtype) @ self._head.T).argmax(-1).tolist()
        return proposals


class LookupProposer:
    """Prompt lookup of transformers: what followed the last few tokens where they stood before. Needs no drafter."""

    taps: Sequence[int] = ()

    def __init__(self, proposals: int, stop: Collection[int]) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        ends = torch.tensor(sorted(stop)) if stop else None
        # Length is limited by the loop, which knows how many tokens are still wanted.
        self._generator = PromptLookupCandidateGenerator(
            eos_token_id=ends, num_output_tokens=proposals, max_length=torch.iinfo(torch.int64).max
        )
        self._text: list[int] = []

    def observe(self, tokens: Sequence[int], states: torch.Tensor | None) -> None:
        """Remember the text."""
        self._text += tokens

    def propose(self, anchor: int) -> list[int]:
        """Up to the configured number of tokens; none if the text has no such place."""
        text = torch.tensor([[*self._text, anchor]])
        found, _ = self._generator.get_candidates(text)
        proposals: list[int] = found[0, text.shape[1] :].tolist()
        return proposals


class TargetRun:
    """One text in the target, and a cache that can forget rejected tokens.

    Only caches of plain keys and values can be cropped. A recurrent state has no record of what it was, and a crop
    would leave it wrong in silence; so caches with any other layer are copied before a block, and a rejected block is
    taken back by running its accepted tokens again on the copy.
    """

    def __init__(self, target: Any) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        self._target = target
        self._cache = DynamicCache(config=target.config)
        self._plain = all(type(layer) is DynamicLayer for layer in self._cache.layers)
        self._before: tuple[Any, list[int]] | None = None
        parameters = inspect.signature(target.forward).parameters
        # Renamed in transformers 5.18 and later.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.length = 0

    def feed(self, tokens: Sequence[int], taps: Sequence[int] = (), *, last: bool = False) -> tuple[Any, Any]:
        """Run tokens behind the cache: float32 logits [tokens, vocabulary] and states [tokens, taps, width].

        With `last` only the last position is projected; states are None without taps.
        """
        if not self._plain and self.length > 0 and len(tokens) > 1:
            self._before = copy.deepcopy(self._cache), list(tokens)
        output = self._run(tokens, logits_to_keep=int(last), output_hidden_states=bool(taps))
        # Tap i is the output of layer i, which transformers numbers i + 1 because 0 is the embedding.
        states = torch.stack([output.hidden_states[tap + 1][0] for tap in taps], dim=1) if taps else None
        return output.logits[0].float(), states

    def forget(self, count: int) -> None:
        """Forget the last `count` tokens, all of the latest feed's."""
        if count == 0:
            return
        if self._plain:
            self._cache.crop(-count)
            self.length -= count
            return
        if self._before is None:
            raise ValueError("only the tokens of the latest feed can be forgotten")
        self._cache, tokens = self._before
        self.length -= len(tokens)
        self._run(tokens[:-count], logits_to_keep=1)

    def _run(self, tokens: Sequence[int], **options: Any) -> Any:
        device = self._target.device
        positions = torch.arange(self.length, self.length + len(tokens), device=device)
        self.length += len(tokens)
        return self._target(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=positions[None],
            use_cache=True,
            **{self._cache_name: self._cache},
            **options,
        )


@torch.inference_mode()
def greedy(target: Any, prompt: Sequence[int], limit: int, stop: Collection[int]) -> Greedy:
    """The target alone: its greedy answer of at most `limit` tokens, ending with the first token in `stop`."""
    run = TargetRun(target)
    tokens: list[int] = []
    gaps: list[float] = []
    feed = list(prompt)
    while len(tokens) < limit and not (tokens and tokens[-1] in stop):
        logits, _ = run.feed(feed, last=True)
        best = logits[-1].topk(2).values
        tokens.append(int(logits[-1].argmax()))
        gaps.append(float(best[0] - best[1]))
        feed = tokens[-1:]
    return Greedy(tokens, gaps)


@torch.inference_mode()
def decode(target: Any, proposer: Proposer, prompt: Sequence[int], limit: int, stop: Collection[int]) -> Decoded:
    """The same answer in fewer forwards of the target. Raises ValueError for an empty prompt or a limit below 1."""
    if not prompt or limit < 1:
        raise ValueError("decoding needs at least one token of prompt and room for one token of answer")
    run = TargetRun(target)
    logits, states = run.feed(prompt, proposer.taps, last=True)
    proposer.observe(prompt, states)
    tokens, accepted = [int(logits[-1].argmax())], []
    while len(tokens) < limit and tokens[-1] not in stop:
        fed = [tokens[-1], *proposer.propose(tokens[-1])[: limit - len(tokens)]]
        logits, states = run.feed(fed, proposer.taps)
        new, taken = _verify(fed[1:], logits.argmax(-1).tolist(), stop)
        new = new[: limit - len(tokens)]
        tokens += new
        accepted.append(taken)
        # The newest token is the next anchor, which neither side has seen as an input yet.
        run.forget(len(fed) - len(new))
        proposer.observe(fed[: len(new)], None if states is None else states[: len(new)])
    return Decoded(tokens, accepted)


def _verify(proposals: Sequence[int], choices: Sequence[int], stop: Collection[int]) -> tuple[list[int], int]:
    """The tokens that a verified block yields, and how many of them were proposals.

    `choices[k]` is what the target says after the anchor and the first k proposals. Tokens behind a stop do not count.
    """
    taken = 0
    while taken < len(proposals) and proposals[taken] == choices[taken]:
        taken += 1
        if proposals[taken - 1] in stop:
            return list(proposals[:taken]), taken
    return [*proposals[:taken], choices[taken]], taken
