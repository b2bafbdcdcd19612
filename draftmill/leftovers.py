"""What only a kill can leave in a store: unfinished files and uploads, claims of the dead, journals of finished jobs.

A job clears its journal and lets its claim go when its outputs are published. Killed between the two it leaves them, and
no job looks at them again; so a build looks when it starts and when it has succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftmill import build_claims, layout
from draftmill.graph import Graph
from draftmill.store.base import Store

_JOURNAL, _CLAIMS = "journal/", "claims/"


def at_start(store: Store, graph: Graph, older_than_s: float, run: str) -> None:
    """Remove what killed builds have left, and states that an interrupted build did not get to remove.

    The states stay while another build is at work: it may have extracted them for a training of its own.
    `graph` has seen the store as it is now; unfinished files and uploads go if they are older than that or if nobody
    needs them any more.
    """
    if (spent := graph.spent_states()) and not build_claims.others_at_work(store, store.list(_CLAIMS), run):
        _remove(store, spent)
    _clear(store, graph, older_than_s)


def at_end(store: Store, graph: Graph, older_than_s: float, run: str, planned: Graph) -> None:
    """The same when the build `run`, which was `planned` so, has succeeded; its claims go too.

    Of the states those go that its start left alone, if who seemed at work then is known dead now. What was asked of
    Snakemake says nothing: a call for some targets succeeds while other jobs are unfinished.
    """
    spent = [key for key in planned.spent_states() if key in graph.present]
    if spent and build_claims.others_died(store, store.list(_CLAIMS), run):
        _remove(store, spent)
    _clear(store, graph, older_than_s, run)


def _remove(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.delete(key)


def _clear(store: Store, graph: Graph, older_than_s: float, run: str | None = None) -> None:
    folders = _spent(graph)
    store.remove_unfinished(older_than_s, done=folders)
    for key in store.list(_JOURNAL):
        if key.startswith(folders):
            store.delete(key)
    build_claims.sweep(store, sorted(store.list(_CLAIMS)), run)


def _spent(graph: Graph) -> tuple[str, ...]:
    """Folders of journals of jobs whose outputs are in the store."""
    fp = graph.specs.fp
    jobs = [("generate", shard, f"{shard}-{fp['generate']}") for shard in graph.shards]
    jobs += [("train", str(window), f"{fp['train']}-{window}") for window in range(len(graph.windows))]
    return tuple(f"{layout.journal(stage, name)}/" for stage, job, name in jobs if not graph.wanted(stage, job))
