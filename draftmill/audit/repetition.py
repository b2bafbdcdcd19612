"""How much of an answer it has already said: the share of repeated n-grams.

For one answer it is seq-rep-n = 1 - unique n-grams / n-grams (Welleck et al. 2020, "Neural Text Generation with
Unlikelihood Training", arXiv 1908.04319, section 6) with n = 4. A loop of any period p gives about 1 - p / length. An
answer is called repetitive when the greater part of its 4-grams occurred in it before; a short answer such as a list
of zeros is not judged.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftmill.audit.columns import Bools, Ints, Ragged

N = 4
REPETITIVE_SHARE = 0.5
LEAST_TOKENS = 32
_CHUNK_TOKENS = 4_000_000
_HASH_BITS = 44  # the other 20 bits of a key are the row within its chunk
# Odd 64-bit constants of a multilinear hash, whose high bits are the good ones (Lemire and Kaser, arXiv 1202.4961).
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


def repeated_ngrams(answers: Ragged) -> tuple[Ints, Ints]:
    """N-grams that occurred before in the same row, and all n-grams of it; two int64 [rows]."""
    repeated = np.zeros(len(answers.lengths), np.int64)
    for first, last in _chunks(answers.offsets):
        start, end = answers.offsets[first], answers.offsets[last]
        repeated[first:last] = _repeated(answers.flat[start:end], answers.offsets[first : last + 1] - start)
    return repeated, np.maximum(answers.lengths - (N - 1), 0)


def repetitive(answers: Ragged) -> Bools:
    """Which rows mostly repeat themselves; bool [rows]."""
    repeated, total = repeated_ngrams(answers)
    return (answers.lengths >= LEAST_TOKENS) & (repeated > REPETITIVE_SHARE * total)


def _chunks(offsets: Ints) -> list[tuple[int, int]]:
    """Ranges of rows with about _CHUNK_TOKENS tokens and at most 2**20 rows each."""
    chunks, first, rows = [], 0, len(offsets) - 1
    while first < rows:
        by_tokens = int(np.searchsorted(offsets, offsets[first] + _CHUNK_TOKENS, side="right")) - 1
        last = min(max(by_tokens, first + 1), first + (1 << (64 - _HASH_BITS)), rows)
        chunks.append((first, last))
        first = last
    return chunks


def _repeated(flat: npt.NDArray[np.int32], offsets: Ints) -> Ints:
    rows = len(offsets) - 1
    if len(flat) < N:
        return np.zeros(rows, np.int64)
    row = np.repeat(np.arange(rows, dtype=np.uint64), np.diff(offsets))
    ids = flat.astype(np.uint64)
    grams = len(flat) - N + 1
    hashed = np.zeros(grams, np.uint64)
    for k, factor in enumerate(_FACTORS):
        hashed += (ids[k : k + grams] + np.uint64(1)) * np.uint64(factor)
    keys = (row[:grams] << np.uint64(_HASH_BITS)) | (hashed >> np.uint64(64 - _HASH_BITS))
    keys = np.sort(keys[row[:grams] == row[N - 1 :]])
    again = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(_HASH_BITS)
    return np.bincount(again.astype(np.int64), minlength=rows)
