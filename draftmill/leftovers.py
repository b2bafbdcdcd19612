"""What only a kill can leave in a store: unfinished files and uploads, claims of the dead, journals of finished jobs.

A job clears its journal and lets its claim go when its outputs are published. Killed between the two it leaves them, and
no job looks at them again; so a build looks when it starts and when it has succeeded.
"""

from __future__ import annotations

from collections.abc import Collection

from draftmill import build_claims, layout
from draftmill.graph import Graph
from draftmill.store.base import Store

_JOURNAL, _CLAIMS = "journal/", "claims/"


def at_start(store: Store, graph: Graph, older_than_s: float) -> None:
    """Remove leftovers that the build's listing shows, and unfinished files and uploads older than that."""
    folders = _spent(graph, all_done=False)
    store.remove_unfinished(older_than_s, done=folders)
    for key in [*graph.spent_states(), *_within(folders, graph.present)]:
        store.delete(key)
    build_claims.sweep(store, sorted(graph.present))


def at_end(store: Store, graph: Graph, run: str, older_than_s: float) -> None:
    """Remove the leftovers of a build that has succeeded after kills."""
    folders = _spent(graph, all_done=True)
    store.remove_unfinished(older_than_s, done=folders)
    for key in _within(folders, store.list(_JOURNAL)):
        store.delete(key)
    build_claims.sweep(store, sorted(store.list(_CLAIMS)), run)


def _spent(graph: Graph, *, all_done: bool) -> list[str]:
    """Folders of journals that are not needed any more: of jobs whose outputs are in the store, or of all jobs."""
    fp = graph.specs.fp
    jobs = [("generate", shard, f"{shard}-{fp['generate']}") for shard in graph.shards]
    jobs += [("train", str(window), f"{fp['train']}-{window}") for window in range(len(graph.windows))]
    return [f"{layout.journal(stage, name)}/" for stage, job, name in jobs if all_done or not graph.wanted(stage, job)]


def _within(folders: Collection[str], keys: Collection[str]) -> list[str]:
    begins = tuple(folders)
    return [key for key in keys if key.startswith(_JOURNAL) and key.startswith(begins)]
