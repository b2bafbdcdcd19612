"""The split and the shard boundaries, decided by the prompts' ids alone.

Local-minimum chunking: a shard ends after a record whose hash is strictly the smallest within `reach` records on both
sides, and never within `reach` of an end of the sequence. Whether a record is such a minimum depends on its
neighbourhood only, so an edit moves boundaries at most next to the shard it touches, and nothing cascades. Two minima
are more than `reach` apart, so a shard has at least reach + 1 records (unless there are fewer altogether), and
2 * reach + 1 on average. The split uses the first half of an id and the boundaries the second, so that they are
independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from draftmill.canonical import fingerprint
from draftmill.prompts.record import ID_BYTES

_HALF = ID_BYTES // 2


def is_held_out(prompt: bytes, share: float) -> bool:
    """Whether a prompt is kept for evaluation, whatever other prompts there are."""
    return int.from_bytes(prompt[:_HALF]) < share * 256.0**_HALF


def boundary_hash(prompt: bytes) -> int:
    """The hash that shard boundaries are found by."""
    return int.from_bytes(prompt[_HALF:])


def reach_of(shard_rows: int) -> int:
    """How far a minimum must reach for shards of `shard_rows` records on average."""
    return (shard_rows - 1) // 2


def cut(hashes: Sequence[int], reach: int) -> list[tuple[int, int]]:
    """The shards of a sequence as half-open ranges of its records, in O(n).

    A stack of rising hashes gives each record the nearest record on either side that is not larger.
    """
    first, last = reach, len(hashes) - 2 - reach
    ends: list[int] = []
    stack: list[tuple[int, int]] = []  # (record, nearest not larger one before it)
    for here, value in enumerate([*hashes, -1]):
        before = -len(hashes) - 1
        while stack and hashes[stack[-1][0]] >= value:
            record, nearest = stack.pop()
            if record - nearest > reach and here - record > reach and first <= record <= last:
                ends.append(record + 1)
            if hashes[record] == value:
                before = record
        stack.append((here, max(before, stack[-1][0] if stack else before)))
    bounds = [0, *sorted(ends), len(hashes)]
    return [(start, stop) for start, stop in pairwise(bounds) if stop > start]


def shard_name(members: Sequence[tuple[str, str]]) -> str:
    """The name of a shard: a digest of the (prompt id, source) of its records in order."""
    return fingerprint([list(member) for member in members])
