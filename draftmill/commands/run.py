"""`draftmill run`: Snakemake under a supervisor that starts it again after what passes (supervise.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from draftmill.errors import UserError

_CONFIG = Path("config/config.yaml")


def register(app: typer.Typer) -> None:
    """Add `draftmill run` to the command line."""

    @app.command(context_settings={"ignore_unknown_options": True})
    def run(
        arguments: Annotated[list[str] | None, typer.Argument(help="Snakemake's arguments, after --.")] = None,
        attempts: Annotated[int, typer.Option(min=1, help="Starts in a row that finish no job before giving up.")] = 20,
        for_: Annotated[
            str | None, typer.Option("--for", metavar="TIME", help="Start nothing again after 90s, 30m, 12h or 3d.")
        ] = None,
    ) -> None:
        """Build, and build on after outages, kills and busy GPUs: draftmill run -- --cores 4 --resources gpu=4."""
        from draftmill.durations import seconds
        from draftmill.supervise import Limits, Supervisor

        limits = Limits(attempts=attempts, for_s=float("inf") if for_ is None else seconds("--for", for_))
        supervisor = Supervisor(arguments or [], limits)
        try:
            status = supervisor.run()
        finally:
            _end_servers(arguments or [], supervisor.runs)
        raise typer.Exit(status)


def _end_servers(arguments: Sequence[str], runs: set[str]) -> None:
    """End the servers of these runs; a Snakemake that was killed could not."""
    if not runs:
        return
    from draftmill.config import read_yaml
    from draftmill.engines.server import end_servers
    from draftmill.gpu.policy import GatePolicy

    def say(text: str) -> None:
        print(f"draftmill run: {text}", file=sys.stderr, flush=True)

    try:
        policy = GatePolicy.model_validate(read_yaml(_configfile(arguments)).get("gate") or {})
        for run in sorted(runs):
            end_servers(policy, run, say)
    except (UserError, OSError, ValueError) as error:
        say(f"Servers of this run were not looked for ({error}); `draftmill reclaim` ends what is left.")


def _configfile(arguments: Sequence[str]) -> Path:
    """The configuration that Snakemake was given, or the default one."""
    for place, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name in ("--configfile", "--configfiles") and (value or place + 1 < len(arguments)):
            return Path(value or arguments[place + 1])
    return _CONFIG
