"""`draftmill check`: hold a drafter checkpoint against the contract of the engines and against its target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `draftmill check` to the command line."""

    @app.command()
    def check(
        folder: Annotated[Path, typer.Argument(help="Folder with model.safetensors and config.json.")],
        target: Annotated[
            Path | None, typer.Option(help="The target's folder or config.json; without it only the drafter itself.")
        ] = None,
    ) -> None:
        """Check a drafter's names, shapes, ids, rotary base and layer types, without a GPU; fails if one is wrong."""
        from draftmill.drafter.checkpoint import read_json
        from draftmill.drafter.conformance import check as problems_of

        path = target / "config.json" if target is not None and target.is_dir() else target
        problems = problems_of(folder, None if path is None else read_json(path))
        for problem in problems:
            typer.echo(problem)
        if problems:
            raise typer.Exit(1)
        typer.echo(f"{folder} keeps the contract" + ("." if target is None else f" and fits {target}."))
