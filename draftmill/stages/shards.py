"""A shard's prompts as rows to ask, and its journal as published rows: what needs the tokenizer.

The lane and its jobs never load one. They leave both to a process that has it in memory for the whole build
(lane_helper.py).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill import layout
from draftmill.config import Config
from draftmill.errors import UserError
from draftmill.job import RUN_VARIABLE
from draftmill.schemas import PROMPTS, read_rows
from draftmill.stages.asking import Target, sort_rows
from draftmill.stages.generate import Outputs, write_shard
from draftmill.stages.reuse import Forerunners
from draftmill.stages.rows import Asked, Ledger
from draftmill.store.base import Store
from draftmill.store.journal import Journal


def journal_of(store: Store, shard: str, generate: str) -> Journal:
    """The journal of a shard; `generate` is the fingerprint of the generate stage."""
    return Journal(store, layout.journal("generate", f"{shard}-{generate}"))


class Shards:
    """Reads shards of a store and writes what became of them."""

    def __init__(self, config: Config, target: Target, store: Store, generate: str) -> None:
        """`generate` is the fingerprint of the generate stage."""
        self._config, self._target, self._store, self._generate = config, target, store, generate

    def read(self, shard: str, coming: bool) -> list[Asked] | None:
        """The rows of a shard that are to be asked; None if it is not there.

        A `coming` one is left alone too if it is finished, or if another build or another host works on it. Rows that
        earlier shards have go to its journal.
        """
        if coming and (self._finished(shard) or self._claimed_elsewhere(shard)):
            return None
        rows = self._prompts(shard)
        if rows is None:
            return None
        _, asked, _ = sort_rows(rows, self._config, self._target)
        ledger = self._ledger(shard)
        mixed = bool(self._config.generate.mix)
        Forerunners(self._store, shard, self._generate, mixed).hand_over(asked, ledger, self._target.rules)
        return asked

    def write(self, shard: str, outputs: Outputs, provenance: Mapping[str, Any]) -> None:
        """Publish a shard from its journal. Raises RuntimeError if the journal does not hold every row."""
        rows = self._prompts(shard)
        if rows is None:
            raise UserError(f"The prompts of shard {shard} are not in the store: run `draftmill index`.")
        found = sort_rows(rows, self._config, self._target)
        write_shard(self._config, self._target.tokenizer, rows, found, self._ledger(shard), outputs, provenance)

    def _ledger(self, shard: str) -> Ledger:
        ledger = Ledger(self._config.generate, journal_of(self._store, shard, self._generate))
        ledger.load()
        return ledger

    def _finished(self, shard: str) -> bool:
        return self._store.info(layout.completions(shard, self._generate)) is not None

    def _claimed_elsewhere(self, shard: str) -> bool:
        try:
            claim = json.loads(self._store.get(layout.claim("generate", f"{shard}-{self._generate}")))
            ours = (os.environ.get(RUN_VARIABLE, ""), socket.gethostname())
            return bool((claim["run"], claim["host"]) != ours)
        except (KeyError, ValueError, TypeError):
            return False

    def _prompts(self, shard: str) -> list[dict[str, Any]] | None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.parquet"
            try:
                self._store.fetch(layout.prompts(shard), path)
            except KeyError:
                return None
            return read_rows(path, PROMPTS)
