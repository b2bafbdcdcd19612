"""`draftmill dashboard` and `draftmill report`: a build in a browser, live or as one file."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from draftmill.commands.status import open_reader
from draftmill.errors import UserError

_TOKEN = "DRAFTMILL_TOKEN"
ConfigFile = Annotated[Path | None, typer.Option("--configfile", help="The configuration.")]
StoreUrl = Annotated[str | None, typer.Option("--store", help="The store itself: a folder or s3://…")]


def register(app: typer.Typer) -> None:
    """Add `dashboard` and `report`."""

    @app.command()
    def dashboard(
        configfile: ConfigFile = None,
        store: StoreUrl = None,
        host: Annotated[str, typer.Option("--host", help="The address to bind to.")] = "127.0.0.1",
        port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8550,
        token: Annotated[
            str | None,
            typer.Option("--token", envvar=_TOKEN, help="Ask for it; made where it is needed and not given."),
        ] = None,
    ) -> None:
        """Show a build in a browser, live, until Ctrl-C; it reads the store alone and writes nothing there."""
        serve(configfile, store, host, port, token)

    @app.command()
    def report(
        out: Annotated[Path, typer.Option("--out", help="The file to write.")],
        configfile: ConfigFile = None,
        store: StoreUrl = None,
    ) -> None:
        """Write what the dashboard shows now as one HTML file that needs no server."""
        from draftmill.dashboard.static_page import write

        written = write(open_reader(configfile, store), out)
        typer.echo(f"{out}: {written / 1e6:.1f} MB")


def serve(configfile: Path | None, store: str | None, host: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C. Raises UserError if the store is none or the address cannot be had."""
    import uvicorn

    from draftmill.dashboard.app import application
    from draftmill.dashboard.board import Board
    from draftmill.dashboard.guard import LOOPBACK, is_loopback
    from draftmill.store.open import is_s3

    reader = open_reader(configfile, store)
    own = is_loopback(host)
    token = checked(token) if token is not None else None if own else secrets.token_urlsafe(24)
    bound = _bind(host, port)
    names = (*LOOPBACK, host.strip("[]").lower()) if own else None
    app = application(
        Board(reader, remote=is_s3(reader.store.url)), token=token, names=names, logs=Path() if store is None else None
    )
    typer.echo(f"{reader.store.url} is shown at {address(host, bound.getsockname()[1], token)} until Ctrl-C.")
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, lifespan="on"
    )
    try:
        uvicorn.Server(settings).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()


def checked(token: str) -> str:
    """A token that a cookie can hold. Raises UserError for one that is guessed soon."""
    if len(token) < 12 or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise UserError("--token needs at least 12 letters, digits, - and _: leave it out and one is made.")
    return token


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host.strip("[]")
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def _bind(host: str, port: int) -> socket.socket:
    plain = host.strip("[]")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    try:
        return socket.create_server((plain, port), family=family)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port} cannot be bound ({error.strerror or error}): "
            "give another --port, or 0 for a free one."
        ) from None
