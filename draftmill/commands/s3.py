"""`draftmill serve-s3`: an S3 service on this machine, to try a store on S3 without an account."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftmill.seaweed import Seaweed

_DEFAULT_PORT = 8333


def register(app: typer.Typer) -> None:
    """Add `serve-s3`."""

    @app.command(name="serve-s3", context_settings={"ignore_unknown_options": True})
    def serve_s3(
        folder: Annotated[Path, typer.Argument(help="Where the service keeps its objects.")],
        command: Annotated[
            list[str] | None, typer.Argument(help="After --: run this command with the service and end with it.")
        ] = None,
        bucket: Annotated[str, typer.Option(help="The bucket that is made if it is not there.")] = "draftmill",
        port: Annotated[int, typer.Option(help="Port on loopback; 0: a free one.")] = _DEFAULT_PORT,
    ) -> None:
        """Run SeaweedFS on this machine, until Ctrl-C or as long as a command runs."""
        from draftmill.seaweed import Seaweed as Service

        # Whoever ends this process by SIGTERM means the service too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Service(folder, bucket, port or None) as service:
            raise typer.Exit(_run(command, service.environment) if command else _wait(service))


def _run(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has told the command too; it ends in its own time
            return process.wait()


def _wait(service: Seaweed) -> int:
    typer.echo(f"# SeaweedFS serves {service.url()} from {service.folder}; Ctrl-C ends it. In another terminal:")
    for name, value in service.environment.items():
        typer.echo(f"export {name}={value}")
    try:
        signal.pause()
    except KeyboardInterrupt:
        typer.echo("ended")
    return 0
