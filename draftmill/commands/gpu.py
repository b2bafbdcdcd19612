"""`draftmill gate`, `draftmill reclaim` and `draftmill gpus`: the GPU gate by hand.

A person who wants to start a run asks the same code that the run will ask, with the same limits: those of the `gate:`
section of config/config.yaml where there is one. Nothing heavy is imported, so that the answer comes at once.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from draftmill.errors import UserError
from draftmill.gpu.check import check
from draftmill.gpu.policy import GatePolicy
from draftmill.gpu.record import GpuRecord, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column

    from draftmill.gpu.reclaim import Outcome, Plan

_CONFIG = Path("config/config.yaml")
_STYLES = {"free": "green", "busy": "yellow", "unknown": "red", "not_required": "dim"}

Config = Annotated[
    Path | None,
    typer.Option(
        "--configfile",
        "--config",
        help="Take the limits from the gate: section of this file (config/config.yaml if there).",
    ),
]
gpus_app = typer.Typer(invoke_without_command=True, help="Show the GPUs, and take one out of a running build.")


def register(app: typer.Typer) -> None:
    """Add the three commands to the command line."""
    app.command()(gate)
    app.command()(reclaim)
    app.add_typer(gpus_app, name="gpus")


def gate(
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", help="How many GPUs are needed, or which ones by UUID (default: all that are visible)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict record.")] = False,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for what may pass.")] = 0.0,
    config: Config = None,
) -> None:
    """Say whether the GPUs are free: exit status 0 free, 1 busy, 2 unknown."""
    count, uuids = _wanted(gpus or [])
    verdict = check(_policy(config), gpus=count, uuids=uuids, wait_s=wait, notify=_note)
    if as_json:
        typer.echo(verdict.text(), nl=False)
    else:
        _show(verdict)
    raise typer.Exit(verdict.exit_code)


def _wanted(gpus: list[str]) -> tuple[int | None, list[str]]:
    names = [name for entry in gpus for name in entry.split(",") if name]
    if len(names) == 1 and names[0].isdigit() and int(names[0]) > 0:
        return int(names[0]), []
    wrong = [name for name in names if not name.startswith("GPU-")]
    if wrong:
        raise UserError(f"--gpus {wrong[0]} is neither a count nor a UUID such as GPU-1a2b; see draftmill gpus.")
    return None, names


def _policy(config: Path | None) -> GatePolicy:
    path = config or _CONFIG
    if config is None and not path.is_file():
        return GatePolicy()
    from draftmill.config import read_yaml

    try:
        return GatePolicy.model_validate(read_yaml(path).get("gate") or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: gate.{key}: {first['msg']}; docs/gpu-gate.md lists the keys of gate.") from None


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(verdict: Verdict) -> None:
    from rich.table import Table

    console = _console()
    table = Table(_whole("GPU"), "name", "used", "processes", "verdict", "reasons", box=None)
    for record in verdict.gpus:
        why = "; ".join(f"{r.code}: {r.detail}" for r in record.reasons)
        style = _STYLES[record.verdict]
        people = str(len(record.processes))
        table.add_row(record.uuid, record.name or "", _used(record), people, f"[{style}]{record.verdict}[/]", why)
    if verdict.gpus:
        console.print(table)
    console.print(_summary(verdict), style=_STYLES[verdict.verdict], markup=False, highlight=False)


def _console() -> "Console":
    from rich.console import Console

    # Where nobody looks, lines are for a program or a log: as wide as they need to be.
    return Console(width=None if sys.stdout.isatty() else 240)


def _whole(title: str) -> "Column":
    from rich.table import Column

    return Column(title, no_wrap=True, min_width=40)


def _summary(verdict: Verdict) -> str:
    from draftmill.gpu.errors import sentence

    if verdict.verdict != "free":
        return sentence(verdict)
    free = sum(record.verdict == "free" for record in verdict.gpus)
    return f"free: {free} of {len(verdict.gpus)} GPUs, {verdict.wanted} wanted ({verdict.elapsed_s:.1f} s)"


def _used(record: GpuRecord) -> str:
    if record.mem is None:
        return "?"
    return f"{record.mem.used >> 20} of {record.mem.total >> 20} MiB"


def reclaim(
    dry_run: Annotated[
        bool | None,
        typer.Option("--dry-run/--no-dry-run", help="Only say what would be done (the default on a terminal)."),
    ] = None,
    idle_servers: Annotated[
        bool, typer.Option("--idle-servers", help="End living servers of ours too, if no job uses them.")
    ] = False,
    config: Config = None,
) -> None:
    """End what dead runs of ours left on the GPUs and in /dev/shm; list what may not be touched."""
    from draftmill.gpu import reclaim as work

    policy = _policy(config)
    plan = work.find(policy, idle_servers)
    only_look = sys.stdout.isatty() if dry_run is None else dry_run
    _show_plan(plan, "would be" if only_look else "to be")
    if only_look:
        if plan.processes or plan.files or plan.servers:
            typer.echo("Nothing was changed; `draftmill reclaim --no-dry-run` does it.")
        return
    outcome = work.carry_out(policy, plan)
    _show_outcome(outcome)
    raise typer.Exit(1 if outcome.stuck else outcome.verdict.exit_code)


def _show_plan(plan: "Plan", how: str) -> None:
    for found in plan.processes.values():
        typer.echo(f"{how} ended: pid {found.process.pid} ({found.command}): {found.why}")
    for server in plan.servers:
        typer.echo(f"{how} ended: idle server, pid {server.holder.pid}, on {', '.join(server.uuids)}")
    for file in plan.files:
        typer.echo(f"{how} removed: /dev/shm/{file.name}, {file.bytes} bytes")
    for text in plan.untouched:
        typer.echo(f"not touched: {text}")
    if not (plan.processes or plan.servers or plan.files):
        typer.echo("No leftovers of dead runs.")


def _show_outcome(outcome: "Outcome") -> None:
    for found in outcome.stuck:
        typer.echo(f"would not end: pid {found.process.pid} ({found.command}); it may wait inside the driver")
    ended = len(outcome.ended) + len(outcome.servers)
    typer.echo(f"{ended} ended, {len(outcome.removed)} files removed.")
    _show(outcome.verdict)


@gpus_app.callback()
def gpus(context: typer.Context, config: Config = None) -> None:
    """Show each GPU: memory, who holds its lease, and the verdict."""
    if context.invoked_subcommand is None:
        _show_gpus(_policy(config))


def _show_gpus(policy: GatePolicy) -> None:
    from rich.table import Table

    from draftmill.gpu import lease as leases

    folder = leases.lock_dir(policy.lock_dir)
    verdict = check(policy.model_copy(update={"settle_samples": 1}))
    table = Table(_whole("GPU"), "used", "lease", "run", "stage", "shard", "verdict", box=None)
    for record in verdict.gpus:
        holder = _holder(leases.current(folder, record.uuid))
        table.add_row(record.uuid, _used(record), *holder, _state(record))
    console = _console()
    if verdict.gpus:
        console.print(table)
    else:
        console.print(_summary(verdict), markup=False, highlight=False)


def _holder(record: Any) -> tuple[str, str, str, str]:
    if record is None:
        return "", "", "", ""
    return f"{record.kind} {record.holder.pid}", record.run_id or "", record.stage or "", record.shard or ""


def _state(record: GpuRecord) -> str:
    codes = [r.code for r in record.reasons]
    first = "leased" if "leased" in codes else codes[0] if codes else ""
    paused = ", paused" if "paused" in codes and first != "paused" else ""
    return f"{record.verdict}{f' ({first}{paused})' if first else ''}"


@gpus_app.command()
def pause(
    uuid: Annotated[str, typer.Argument(help="The GPU's UUID, or its beginning.")], config: Config = None
) -> None:
    """Take one GPU out of a running build once its current shard is done."""
    from draftmill.gpu import lease as leases
    from draftmill.gpu import pause as marks
    from draftmill.gpu import servers

    policy = _policy(config)
    folder = leases.lock_dir(policy.lock_dir)
    full = _one(uuid, policy)
    fresh = marks.pause(folder, full)
    typer.echo(f"GPU {full} {'is paused' if fresh else 'was paused already'}.")
    if servers.leave_if_idle(folder, full, policy.server_stop_s):
        typer.echo("The idle server on it has left.")
    if (record := leases.current(folder, full)) is not None:
        typer.echo(f"It is in use until its shard is done: {leases.Occupant(full, record).describe()}.")


@gpus_app.command()
def resume(
    uuid: Annotated[str, typer.Argument(help="The GPU's UUID, or its beginning.")], config: Config = None
) -> None:
    """Give a paused GPU back to running builds."""
    from draftmill.gpu import lease as leases
    from draftmill.gpu import pause as marks

    policy = _policy(config)
    folder = leases.lock_dir(policy.lock_dir)
    full = _one(uuid, policy, marks.paused(folder))
    typer.echo(f"GPU {full} {'is back' if marks.resume(folder, full) else 'was not paused'}.")


def _one(name: str, policy: GatePolicy, known: tuple[str, ...] = ()) -> str:
    """The one GPU that `name` begins; raises UserError. A paused GPU is known even when the driver is not."""
    from draftmill.gpu.probe import probe

    names = [uuid for uuid in known if uuid.startswith(name)] or [
        device.uuid
        for device in probe(policy.probe_timeout_s, only_list=True).devices
        if device.uuid is not None and device.uuid.startswith(name)
    ]
    if len(names) != 1:
        raise UserError(f"{name} fits {len(names)} GPUs of this host; `draftmill gpus` lists their UUIDs.")
    return names[0]
