"""The target's tokenizer for showing ids, if its file is on this machine: no transformers, no network, no remote code.

A page must also be right on a machine that has no target; then texts are shown as they were stored and nothing is known
of single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftmill.config import TargetConfig

_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Tokens:
    """A tokenizer: `special` gives the text of each special id."""

    tokenizer: Any
    special: dict[int, str]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text; as numbers where the tokenizer does not know them."""
        try:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):
            return " ".join(map(str, ids))


def tokens_of(target: TargetConfig) -> Tokens | None:
    """The tokenizer of a target; None if its file is not here or is none."""
    path = _path(target)
    return _load(path, path.stat().st_mtime) if path is not None else None


def _path(target: TargetConfig) -> Path | None:
    folder = Path(target.model)
    if folder.is_dir():
        return folder / _FILE if (folder / _FILE).is_file() else None
    if target.model.count("/") != 1 or target.model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(target.model, _FILE, revision=target.revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=2)
def _load(path: Path, _modified: float) -> Tokens | None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception for a file that is none
        return None
    added = tokenizer.get_added_tokens_decoder()
    return Tokens(tokenizer, {number: token.content for number, token in added.items() if token.special})
