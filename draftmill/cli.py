"""The `draftmill` command: one small subcommand for each thing a person does beside running Snakemake.

Each room registers its own commands; heavy libraries are imported inside them, so that `draftmill gate` starts fast.
"""

from __future__ import annotations

import sys

import typer

from draftmill.commands import audit, bench, build, check, dashboard, gpu, plan, run, s3, status, store
from draftmill.errors import UserError

app = typer.Typer(
    name="draftmill",
    help="Build a measured speculative-decoding drafter from prompts. The build itself is run by snakemake.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for room in (build, audit, bench, check, gpu, plan, run, s3, status, dashboard, store):
    room.register(app)


def main() -> None:
    """Run the command line; a user's mistake ends with its sentence and status 2."""
    try:
        app()
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        raise SystemExit(2) from None
