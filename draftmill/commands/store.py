"""`draftmill verify`, `gc`, `adopt` and `show`: looking after a store."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftmill.errors import UserError

if TYPE_CHECKING:
    from draftmill.config import Config
    from draftmill.graph import Graph
    from draftmill.integrity.adopt import Plan
    from draftmill.integrity.gc import Waste
    from draftmill.integrity.reader import Reader
    from draftmill.integrity.verify import Options, Verdict
    from draftmill.records import Record
    from draftmill.store.base import Store

_CONFIG = Path("config/config.yaml")
_SHOWN = 20
ConfigFile = Annotated[Path, typer.Option("--configfile", help="The configuration.")]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--configfile", help="A configuration whose objects stay; give it again for each further one."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(verify)
    app.command()(gc)
    app.command()(adopt)
    app.command()(show)


# verify ---------------------------------------------------------------------------------------------------------------


def verify(
    configfile: ConfigFile = _CONFIG,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte: digests, every number, every token.")] = False,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of the shards to look at.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Which share; without it another one each time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move damaged objects out of the way.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write the records that sound objects lack.")] = False,
) -> None:
    """Check every object of the store. Status 0: nothing is damaged, 1: something is, 2: a mistake in the call."""
    from draftmill.integrity.quarantine import quarantine as move
    from draftmill.integrity.reader import Reader
    from draftmill.integrity.verify import Options

    if record and not deep:
        raise UserError("--record writes down the bytes that are there as sound: give --deep too, which looks at them.")
    options = Options(deep, sample, int(time.time()) if seed is None else seed)
    reader = Reader(_store(_load(configfile)))
    verdict = _looked(reader, options)
    moved = move(reader, verdict.findings) if quarantine else None
    written = _record(reader, verdict) if record else []
    if as_json:
        typer.echo(_json_of(verdict, options, moved.keys if moved else [], written))
    else:
        _say_verdict(verdict, options, reader.store.url)
        _say_changes(verdict, moved.folder if moved else "", moved.keys if moved else [], written)
    raise typer.Exit(1 if verdict.damage else 0)


def _looked(reader: Reader, options: Options) -> Verdict:
    from draftmill.integrity.verify import verify as look

    with _bar("verifying") as progress:
        return look(reader, options, progress)


def _record(reader: Reader, verdict: Verdict) -> list[str]:
    from draftmill.integrity.recording import write_missing

    return write_missing(reader, verdict.findings)


def _json_of(verdict: Verdict, options: Options, moved: Sequence[str], written: Sequence[str]) -> str:
    value: dict[str, Any] = {
        "findings": [finding.to_json() for finding in verdict.findings],
        "objects": verdict.objects,
        "bytes": verdict.bytes,
        "unopened": verdict.unopened,
        "deep": options.deep,
        "sample": options.sample,
        "seed": options.seed,
        "quarantined": list(moved),
        "recorded": list(written),
    }
    return json.dumps(value, indent=1, ensure_ascii=False)


def _say_verdict(verdict: Verdict, options: Options, url: str) -> None:
    for finding in verdict.damage:
        typer.echo(f"- {finding}")
    _say_notes(verdict)
    share = "" if options.sample >= 1 else f" ({options.sample:.0%} of the shards, --seed {options.seed})"
    depth = "every byte" if options.deep else "footers, keys and sizes"
    damaged = len({finding.key for finding in verdict.damage})
    typer.echo(f"{url}: {verdict.objects} objects, {size(verdict.bytes)}{share}, {depth}: {damaged or 'none'} damaged.")
    if verdict.unopened:
        typer.echo(f"{verdict.unopened} large remote objects were held against their digests alone; --deep opens them.")


def _say_notes(verdict: Verdict) -> None:
    by_kind = Counter(finding.what for finding in verdict.notes)
    for finding in verdict.notes[:_SHOWN]:
        typer.echo(f"  note: {finding}")
    if len(verdict.notes) > _SHOWN:
        typer.echo("  notes in all: " + ", ".join(f"{count} {what}" for what, count in sorted(by_kind.items())))
    if {"record missing", "record unreadable"} & by_kind.keys():
        typer.echo("  `draftmill verify --deep --record` writes the missing records of objects that are sound.")


def _say_changes(verdict: Verdict, folder: str, moved: Sequence[str], written: Sequence[str]) -> None:
    if moved:
        typer.echo(f"{len(moved)} objects were moved to {folder}; the next build makes them again.")
    elif verdict.damage:
        typer.echo("--quarantine moves what is damaged out of the way, so that the next build makes it again.")
    if written:
        typer.echo(f"{len(written)} records were written.")


# gc -------------------------------------------------------------------------------------------------------------------


def gc(
    configfile: ConfigFiles = None,
    grace: Annotated[str, typer.Option(help="Nothing that changed within this time goes: 7d, 12h, 90m.")] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only what would go is told.")] = False,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Quarantined objects may go too.")] = False,
) -> None:
    """Remove what none of the given configurations reaches. Dry unless --yes is given."""
    from draftmill.durations import seconds
    from draftmill.integrity import gc as collector
    from draftmill.integrity.adopt import Adoption
    from draftmill.integrity.reach import reached
    from draftmill.integrity.reader import Reader

    span = seconds("--grace", grace)
    store, graphs = _graphs(configfile or [_CONFIG])
    reader = Reader(store)
    keys, jobs = reached(graphs, store)
    pending = Adoption(reader).plan(graphs).jobs
    kept = keys | {key for job in pending for key in job.keys}
    before = time.time() - span
    found = collector.waste(store, reader.listing, (kept, jobs), before=before, quarantine=quarantine)
    if yes:
        collector.remove(store, found)
    uploads = store.remove_unfinished(span, dry=not yes)
    _say_waste(found, grace, yes, len(uploads))
    if pending:
        typer.echo(f"{len(pending)} jobs' objects stay because `draftmill adopt` would still take them over.")


def _say_waste(found: Waste, grace: str, done: bool, uploads: int) -> None:
    for kind, sizes in sorted(found.kinds.items()):
        typer.echo(f"{kind.replace('_', ' '):<14} {len(sizes):>8}  {size(sum(sizes.values()))}")
    verb = "removed" if done else "would go; --yes removes them"
    typer.echo(f"{len(found.keys)} objects, {size(found.bytes)}, {verb}.")
    if found.young:
        typer.echo(f"{found.young} more are reached by nothing but changed within {grace}.")
    if uploads:
        typer.echo(
            f"{uploads} unfinished uploads or files older than {grace} {'were' if done else 'would be'} removed."
        )


# adopt ----------------------------------------------------------------------------------------------------------------


def adopt(
    configfile: ConfigFiles = None,
    yes: Annotated[bool, typer.Option("--yes", help="Relabel; without it only what would be done is told.")] = False,
    remove_old: Annotated[
        bool, typer.Option("--remove-old", help="Remove each old object as soon as its relabelled copy is published.")
    ] = False,
) -> None:
    """Take over objects of older versions of draftmill that still count. Dry unless --yes is given."""
    from draftmill.integrity.adopt import Adoption
    from draftmill.integrity.findings import Unsound
    from draftmill.integrity.reader import Reader

    store, graphs = _graphs(configfile or [_CONFIG])
    adoption = Adoption(Reader(store))
    plan = adoption.plan(graphs)
    _say_plan(plan, yes)
    if not yes:
        return
    damaged = 0
    with _bar("relabelling") as progress:
        for done, job in enumerate(plan.jobs, 1):
            try:
                adoption.take_over(job, remove_old=remove_old)
            except Unsound as unsound:
                damaged += 1
                typer.echo(f"- {job.stage} {job.old} was left: {unsound}")
            if progress is not None:
                progress(done, len(plan.jobs))
    if damaged:
        raise typer.Exit(1)


def _say_plan(plan: Plan, done: bool) -> None:
    by_stage = Counter(job.stage for job in plan.jobs)
    for stage, count in by_stage.items():
        typer.echo(f"{stage:<14} {count:>8} still stand")
    for why, count in sorted(plan.refused.items()):
        typer.echo(f"made again: {count} × {why}")
    verb = "are relabelled" if done else "would be relabelled; --yes does it"
    if plan.jobs:
        typer.echo(f"{len(plan.jobs)} jobs' objects, {size(plan.bytes)}, {verb}.")
    else:
        typer.echo("There is nothing to take over.")


# show -----------------------------------------------------------------------------------------------------------------


def show(
    what: Annotated[str, typer.Argument(metavar="FILE|KEY", help="A file, or the key of an object of the store.")],
    configfile: ConfigFile = _CONFIG,
) -> None:
    """Print what an object was made from (stage spec, fingerprints, versions), and by which run (`record`)."""
    from draftmill import provenance
    from draftmill.integrity.recording import near
    from draftmill.records import describe

    path = Path(what)
    if path.is_file() or not configfile.is_file():
        found, record = provenance.read(path), near(path)
    else:
        found, record = _of_key(what, configfile)
    typer.echo(json.dumps(found | ({"record": describe(record)} if record else {}), indent=2, ensure_ascii=False))


def _of_key(key: str, configfile: Path) -> tuple[dict[str, Any], Record | None]:
    from draftmill.integrity.reader import Reader
    from draftmill.records import record_of

    store = _store(_load(configfile))
    info = store.info(key)
    if info is None:
        raise UserError(f"There is no file {key}, and no such object in {store.url}.")
    found = Reader(store, {key: info}).provenance(key)
    if not found:
        raise UserError(f"{key} in {store.url} carries no provenance, or is damaged: see `draftmill verify`.")
    return found, record_of(store, key)


# What all share -------------------------------------------------------------------------------------------------------


def _load(configfile: Path) -> Config:
    from draftmill.config import load

    return load(configfile)


def _store(config: Config) -> Store:
    from draftmill.store.open import open_store

    return open_store(config.store, config.s3)


def _graphs(configfiles: Sequence[Path]) -> tuple[Store, list[Graph]]:
    """The one store of some configurations and their graphs. Raises UserError if one cannot be read or is of another."""
    from draftmill.workflow import graph_of

    configs = [_load(path) for path in configfiles]
    store = _store(configs[0])
    for path, config in zip(configfiles, configs, strict=True):
        if config.store != configs[0].store:
            raise UserError(
                f"{path} has the store {config.store} and {configfiles[0]} has {configs[0].store}: give configurations of "
                "one store."
            )
    return store, [graph_of(config, store) for config in configs]


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
