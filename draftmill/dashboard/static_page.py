"""The same views as one file that needs no server: what the store shows now, and a bounded number of rows and chains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from draftmill.dashboard import parts
from draftmill.dashboard.board import Board, View
from draftmill.dashboard.detail import Details
from draftmill.dashboard.page import whole
from draftmill.dashboard.samples import Query, Samples
from draftmill.dashboard.shards_with import KINDS
from draftmill.dashboard.tables import Tables
from draftmill.dashboard.wire import embedded
from draftmill.errors import UserError
from draftmill.state.read import Reader
from draftmill.store.local import publish_text

CHAINS = 60
"""Shards whose chains are in a file: those that are not done, over a limit, and the first ones."""
_HOURS = 24


def write(reader: Reader, out: Path) -> int:
    """Publish the file; returns its bytes. Raises UserError if the store cannot be read or the file not be written."""
    board = Board(reader)
    board.look()
    view, problem = board.view, board.problem()
    if view is None:
        raise UserError(problem.message if problem else "The store cannot be read.")
    text = whole(embedded(data_of(view, board)))
    try:
        publish_text(out, text)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out.") from None
    return len(text.encode())


def data_of(view: View, board: Board) -> dict[str, Any]:
    """What the page would ask the server for, by path."""
    details, samples = Details(board.reader.store), Samples(Tables(board.reader.store))
    state = {"number": 1, "revision": 1, "at": time.time(), "problem": None, "state": view.state.to_json()}
    found: dict[str, Any] = {
        "api/state": state,
        "api/quality": json.loads(view.part("quality", parts.quality_part)),
        "api/lengths": samples.lengths(view),
        "api/training": parts.training_part(view, board.reader),
        f"api/lanes?hours={_HOURS}": parts.lanes_part(view, _HOURS),
        "api/shards": parts.shards_part(view),
    }
    for kind in KINDS:
        if kind != "search":
            found[f"api/samples?kind={kind}"] = samples.find(view, Query(kind))
    for name in _chosen(found["api/shards"] or []):
        found[f"api/shard/{name}"] = details.of(view, name)
    return found


def _chosen(shards: list[dict[str, Any]]) -> list[str]:
    def weight(row: dict[str, Any]) -> tuple[bool, bool, bool]:
        return row["verdict"] != "fail", row["state"] not in ("failed", "interrupted"), not row["pilot"]

    return [row["name"] for row in sorted(shards, key=weight)[:CHAINS]]
