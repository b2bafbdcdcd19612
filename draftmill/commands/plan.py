"""`draftmill plan`: what a build would do now, why, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `plan`."""

    @app.command()
    def plan(
        configfile: Annotated[Path, typer.Option("--configfile", help="The configuration.")] = Path(
            "config/config.yaml"
        ),
        as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as one JSON object.")] = False,
    ) -> None:
        """Say what a build would do now, why, and what it takes; writes nothing and needs no GPU."""
        from draftmill.config import load
        from draftmill.plan.read import plan_of
        from draftmill.plan.text import lines
        from draftmill.store.open import open_store

        config = load(configfile)
        found = plan_of(config, open_store(config.store, config.s3))
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
            return
        for line in lines(found):
            typer.echo(line)
