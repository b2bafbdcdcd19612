"""What failed and has not succeeded since, newest first, with the command that shows more."""

from __future__ import annotations

import shlex

from draftmill import layout
from draftmill.graph import Graph
from draftmill.state.jobs import JobView, Picture, heard_at
from draftmill.state.read import Snapshot
from draftmill.state.types import Failure
from draftmill.store.base import ObjectInfo


def log_of(graph: Graph, stage: str, subject: str) -> str:
    """The log of a job, relative to the folder that its build runs in (rules/)."""
    if stage == "extract" and subject in graph.held_out:
        return f"logs/extract_held_out/{subject}.log"
    return f"logs/{stage}/{subject}.log" if subject else f"logs/{stage}.log"


def failures(picture: Picture) -> tuple[Failure, ...]:
    """All failures: jobs whose heartbeat says so, and audits that are over a limit."""
    snapshot, graph, views = picture.snapshot, picture.graph, picture.views
    audited = {view.job.subject: view for view in views if view.job.stage == "audit" and view.state != "done"}
    found = [_job(snapshot, graph, view) for view in views if view.state == "failed" and view.beat is not None]
    for shard, view in audited.items():
        info = snapshot.listing.get(graph.failed_audit(shard))
        if info is not None:
            found.append(_audit(snapshot, graph, view, info))
    return tuple(sorted(found, key=lambda one: (-one.at, one.stage, one.name)))


def _job(snapshot: Snapshot, graph: Graph, view: JobView) -> Failure:
    job, beat = view.job, view.beat
    log = log_of(graph, job.stage, job.subject)
    return Failure(
        stage=job.stage,
        name=job.name,
        subject=job.subject,
        at=heard_at(snapshot, (job.stage, job.name)) or 0.0,
        host=beat.host if beat else "",
        message=(beat.error or "") if beat else "",
        log=log,
        command=_command(log),
        page=None,
        running_again=False,
    )


def _audit(snapshot: Snapshot, graph: Graph, view: JobView, info: ObjectInfo) -> Failure:
    audit, shard = snapshot.audits.get(info.key), view.job.subject
    log = log_of(graph, "audit", shard)
    page = layout.failed_audit(shard, graph.specs.fp["audit"]).removesuffix(".json") + ".html"
    return Failure(
        stage="audit",
        name=view.job.name,
        subject=shard,
        at=info.modified,
        host=view.beat.host if view.beat else "",
        message=audit.findings[0] if audit and audit.findings else "The audit is over a limit.",
        log=log,
        command=_command(log),
        page=page,
        running_again=view.live,
    )


def _command(log: str) -> str:
    return f"tail -n 40 {shlex.quote(log)}"
