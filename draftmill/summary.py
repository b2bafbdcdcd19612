"""What a finished build measured, in a few lines for a terminal."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from draftmill import config as configuration
from draftmill.errors import UserError
from draftmill.graph import ONCE
from draftmill.store.open import open_store
from draftmill.workflow import graph_of


def lines(configfile: Path) -> list[str]:
    """The lines for one configuration. Raises UserError if its evaluation is not in the store."""
    config = configuration.load(configfile)
    store = open_store(config.store, config.s3)
    graph = graph_of(config, store)
    if graph.wanted("evaluate", ONCE):
        raise UserError(f"{store.url} has no evaluation for {configfile}: build first with snakemake.")
    result = json.loads(store.get(graph.evaluation()))
    return [
        f"drafter        {store.address(graph.drafter(graph.last_window, 'model.safetensors'))}",
        f"acceptance     {_length(result['drafter'])}",
        f"prompt lookup  {_length(result['prompt_lookup'])}",
        f"same text      {result['identical']} of {result['prompts']} held-out answers equal the target's own, token for token",
        f"report         {store.address(graph.report())}",
        f"in a browser   {_command()} dashboard --configfile {shlex.quote(str(configfile))}",
    ]


def _command() -> str:
    """How this command line was called, so that the line can be copied."""
    return sys.argv[0] if Path(sys.argv[0]).name == "draftmill" else "draftmill"


def _length(measured: dict[str, Any]) -> str:
    length, saved = measured["acceptance_length"], measured["saved_share"]
    return (
        f"{length['mean']:.2f} tokens a target forward ({length['low']:.2f} to {length['high']:.2f}), "
        f"{saved['mean']:.0%} of the target's forwards saved"
    )
