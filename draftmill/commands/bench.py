"""`draftmill bench generate`: tokens a second of a server on a sample, and the days that the whole set will take."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from draftmill.errors import UserError

_CONFIG = Path("config/config.yaml")
bench_app = typer.Typer(no_args_is_help=True, help="Measure before days are spent.")


def register(app: typer.Typer) -> None:
    """Add `draftmill bench` to the command line."""
    app.add_typer(bench_app, name="bench")


@bench_app.callback()
def _group() -> None:
    pass


@bench_app.command()
def generate(
    configfile: Annotated[
        Path, typer.Option("--configfile", "--config", help="The build's configuration, engine sglang.")
    ] = _CONFIG,
    prompts: Annotated[
        int, typer.Option(min=2, help="Prompts of the sample; several times the rows in flight.")
    ] = 2048,
    in_flight: Annotated[
        str | None, typer.Option("--in-flight", help="Rows in flight to try, as in 128,256,512 (default: by config).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that the build will have.")] = 1,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already; default: one of the build's own.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up for a build that follows.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Measure a sample on a server for a few loads: tokens/s, GPU-hours and days for the whole set, with intervals."""
    from draftmill.config import load
    from draftmill.stages import bench_generate
    from draftmill.store.open import open_store
    from draftmill.workflow import current_index, target_identity

    config = load(configfile)
    if config.generate.engine != "sglang":
        raise UserError(f"{configfile}: generate.engine is {config.generate.engine}; bench generate measures sglang.")
    store = open_store(config.store, config.s3)
    index = current_index(config, store, write=True)
    with tempfile.TemporaryDirectory() as folder:
        found, outlook, rows = bench_generate.run(
            config,
            index,
            store,
            target_identity(config),
            prompts=prompts,
            loads=_loads(in_flight) or bench_generate.loads_of(config),
            gpus=gpus,
            url=url,
            keep=keep,
            folder=Path(folder),
            say=typer.echo,
        )
    for line in bench_generate.sentences(found, outlook, config.generate.sglang.in_flight, rows):
        typer.echo(line)
    if out is not None:
        out.write_text(bench_generate.record(found, outlook, rows) + "\n", encoding="utf-8")


def _loads(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        loads = sorted({int(part) for part in text.split(",")})
    except ValueError:
        loads = [0]
    if loads[0] < 1:
        raise UserError(f"--in-flight {text} is no list of numbers such as 128,256,512.")
    return loads
