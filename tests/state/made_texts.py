"""Rows as a target leaves them, of several kinds, with token ids that the tokenizer of tests/tiny.py decodes.

That tokenizer has one token a byte, in the order of its byte-level alphabet, and four special ones behind them; the ids are
made here without it, so that a store of thousands of shards needs no transformers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from draftmill.audit.tokens import TokenInfo

BOS, END = 257, 258
SOURCES = ("chat", "code", "söurce <b>&amp;")
HOSTILE = [
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 and \x00 NUL and \x08 backspace",
    "right to left \u202eevil\u202c and zero\u200bwidth and \ufeff",
    "a" * 1_000_000,
    '"}</script></style><!-- ${x} {{y}} {% z %} [bold]rich[/bold]',
]


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = {byte: 256 + place for place, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    return [chr(byte) if byte in shown else chr(hidden[byte]) for byte in range(256)]


_ID = {byte: number for number, (_, byte) in enumerate(sorted((c, b) for b, c in enumerate(_alphabet())))}
_BYTE = {number: byte for byte, number in _ID.items()}


def encode(text: str) -> list[int]:
    return [_ID[byte] for byte in text.encode()]


def decode(ids: Sequence[int]) -> str:
    special = {256: "<|endoftext|>", BOS: "<|im_start|>", END: "<|im_end|>", 259: "<|unused|>"}
    parts, run = [], bytearray()
    for one in ids:
        if one in _BYTE:
            run.append(_BYTE[one])
            continue
        parts += [run.decode(errors="replace"), special[one]]
        run.clear()
    return "".join([*parts, run.decode(errors="replace")])


TOKENS = TokenInfo(special_ids=frozenset(range(256, 260)), eos_ids=frozenset({END}), vocabulary=260, decode=decode)

_TEXT = """the river bends where an old bridge carries letters from one market to another and every engine hums while
lantern light draws castle walls over orange gardens until planets bottle up windows of rain"""
_WORDS = _TEXT.split()


def _sentence(made: random.Random, words: int) -> str:
    return " ".join(made.choice(_WORDS) for _ in range(words)).capitalize() + "."


def completion(made: random.Random, number: int, kind: str, max_tokens: int) -> dict[str, Any]:
    """One completions row: `plain`, `cut`, `repeated`, `ok` (the spike), `masked`, or a hostile text itself."""
    source = SOURCES[number % len(SOURCES)]
    prompt = f"{made.choice(_WORDS).capitalize()} {made.choice(_WORDS)} number {made.randrange(10**9)}?"
    text = {
        "plain": _sentence(made, made.choice((4, 9, 16, 30, 50))),
        "cut": _sentence(made, 200),
        "repeated": "again and again and again and " * 8,
        "ok": "OK.",
        "masked": f"# thinking\n{_sentence(made, 8)}\n# answer\n{_sentence(made, 12)}",
    }.get(kind, kind)
    ids = [*encode(text), END]
    cut = len(ids) > max_tokens and kind in ("plain", "cut", "repeated", "masked")
    ids = ids[:max_tokens] if cut else ids
    return {
        "prompt_id": f"{made.getrandbits(128):032x}",
        "sample": 0,
        "source": source,
        "origin": "imported" if kind == "masked" else "generated",
        "prompt_ids": [BOS, *encode("user\n" + prompt), END, BOS, *encode("assistant\n")],
        "output_ids": ids,
        "loss_mask": [place >= 11 for place in range(len(ids))] if kind == "masked" else None,
        "finish_reason": "length" if cut else "stop",
        "text": decode(ids),
    }


def rejection(made: random.Random, number: int) -> dict[str, Any]:
    reason = made.choice(("token_run", "empty", "length"))
    return {
        "prompt_id": f"{made.getrandbits(128):032x}",
        "sample": 0,
        "source": SOURCES[number % len(SOURCES)],
        "reason": reason,
        "detail": f"the last 64 tokens are all {number} <i>&</i>",
    }
