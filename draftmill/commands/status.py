"""`draftmill status`: what a build does now, read from its store alone, on any machine that reaches the store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from draftmill.errors import UserError, reason

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from draftmill.state.read import Choose, Reader
    from draftmill.state.types import State

_CONFIG = Path("config/config.yaml")
_CACHE = Path(".draftmill/state")
# A person is waiting: a build's own patience with a store that is away would look like a hang.
_PATIENCE_S = 5.0


def register(app: typer.Typer) -> None:
    """Add `status`."""

    @app.command()
    def status(
        configfile: Annotated[Path | None, typer.Option("--configfile", help="The configuration.")] = None,
        store: Annotated[str | None, typer.Option("--store", help="The store itself: a folder or s3://…")] = None,
        watch: Annotated[bool, typer.Option("--watch", help="Go on showing until Ctrl-C.")] = False,
        every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between looks, with --watch.")] = 2.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the state as JSON.")] = False,
        prometheus: Annotated[bool, typer.Option("--prometheus", help="Print the state as Prometheus text.")] = False,
    ) -> None:
        """Show stages, rates, time left, lanes and failures of a build; it needs no GPU and writes nothing there."""
        if sum((watch, as_json, prometheus)) > 1:
            raise UserError("Give one of --watch, --json and --prometheus.")
        reader = open_reader(configfile, store)
        if watch:
            _watch(reader, every)
            return
        state = _first(reader)
        if as_json:
            typer.echo(json.dumps(state.to_json(), ensure_ascii=False))
        elif prometheus:
            from draftmill.state.metrics import metrics

            typer.echo(metrics(state), nl=False)
        else:
            _print(state)


def open_reader(configfile: Path | None, store: str | None) -> Reader:
    """A reader of the configuration's store, or of `store` itself; what was read is kept for the next call."""
    from draftmill import config as configuration
    from draftmill.state.cache import cache_file
    from draftmill.state.read import Reader
    from draftmill.store.open import open_store
    from draftmill.store.settings import S3Settings

    if configfile is None and store is None:
        configfile = _CONFIG
    config = configuration.load(configfile) if configfile is not None else None
    settings = (config.s3 if config is not None else S3Settings()).model_copy(update={"wait_s": _PATIENCE_S})
    url = store or (config.store if config is not None else "")
    opened = open_store(url, settings)
    choose: Choose | None = None
    if config is not None:
        from draftmill.state.chosen import plan_for

        choose = plan_for(config, opened)
    return Reader(opened, choose=choose, cache=cache_file(_CACHE, opened.url))


def look(reader: Reader) -> State:
    """The state now. Raises UserError if the store cannot be read or holds nothing at all."""
    from draftmill.state.state import state_of

    try:
        snapshot = reader.snapshot()
    except OSError as error:
        raise UserError(f"The store {reader.store.url} cannot be read: {reason(error)}; mend that first.") from None
    if not snapshot.listing:
        raise UserError(
            f"The store {snapshot.url} holds nothing: start a build, or give the --store or --configfile of another one."
        )
    return state_of(snapshot, time.time())


def _first(reader: Reader) -> State:
    """The first look, which may fetch thousands of small objects; a person at a terminal is told so meanwhile."""
    from rich.console import Console

    with Console(stderr=True).status("Reading the store …"):
        return look(reader)


def _print(state: State) -> None:
    from rich.console import Console

    from draftmill.state.screen import screen

    console = Console(highlight=False, emoji=False)
    console.print(screen(state, console.width))


def _watch(reader: Reader, every: float) -> None:
    """Show the state until Ctrl-C; a store that is away is said and waited for."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, emoji=False)
    try:
        if not console.is_terminal:
            _print_on(console, reader, every)
        with Live(_shown(reader, console.width), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(_shown(reader, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def _print_on(console: Console, reader: Reader, every: float) -> NoReturn:
    """One state below another, for a log."""
    while True:
        console.print(_shown(reader, console.width))
        time.sleep(every)


def _shown(reader: Reader, width: int) -> RenderableType:
    """The screen, or the sentence that says why there is none."""
    from rich.text import Text

    from draftmill.state.screen import screen

    try:
        return screen(look(reader), width)
    except UserError as error:
        return Text(f"{error} Looking again until it is back.")
