"""What a generating engine is: requests of token ids in, results of token ids out, in any order.

An engine never sees text, the store or the journal. It may be killed at any moment; whoever drives it says which rows
are already there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from draftmill.canonical import seed_of

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row is sampled, under the names of the configuration: top_k 0 is all tokens, temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float


@dataclass(frozen=True, slots=True)
class Request:
    """One row to generate: prompt id and sample number, the prompt's ids, the seed of this row alone, its sampling."""

    key: Key
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Result:
    """What the target answered: exactly its ids, and "stop" (ended by itself) or "length" (cut at the limit)."""

    key: Key
    output_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer: a typed reason and a detail for people."""

    key: Key
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who gave a row, and when: the server, its epoch, the client's stay with it (era), and how many canaries it had seen.

    A canary that was sent with span n and answered well vouches for all rows of its era with a lower span.
    """

    server: str
    epoch: int
    era: str
    span: int


class Engine(Protocol):
    """Something that answers requests."""

    def run(self, requests: Sequence[Request], done: Collection[Key]) -> Iterator[Result | Failure]:
        """Answer every request whose key is not in `done`.

        The requests are always the whole shard in its fixed order, so that an engine whose rows depend on their batch
        can form the same batches again after a kill.
        """
        ...


def row_seed(base: int, key: Key, attempt: int) -> int:
    """A 63-bit seed that depends on the row and the attempt only, never on order or batch."""
    return seed_of(f"{base}:{key[0]}:{key[1]}:{attempt}")
