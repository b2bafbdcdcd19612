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


def spent_journals(graph: Graph, keys: Collection[str], *, all_done: bool = False) -> list[str]:
    """Journal objects among `keys` of jobs whose outputs are in the store, or of all jobs of a build that succeeded."""
    fp = graph.specs.fp
    jobs = [("generate", shard, f"{shard}-{fp['generate']}") for shard in graph.shards]
    jobs += [("train", str(window), f"{fp['train']}-{window}") for window in range(len(graph.windows))]
    done = {f"{layout.journal(stage, name)}/" for stage, job, name in jobs if all_done or not graph.wanted(stage, job)}
    return [key for key in keys if key.startswith(_JOURNAL) and _folder(key) in done]


def _folder(key: str) -> str:
    # journal/{stage}/{name}/...
    return "/".join(key.split("/")[:3]) + "/"


def at_start(store: Store, graph: Graph, older_than_s: float) -> None:
    """Remove leftovers that the build's listing shows, and unfinished files and uploads older than that."""
    store.remove_unfinished(older_than_s)
    for key in [*graph.spent_states(), *spent_journals(graph, graph.present)]:
        store.delete(key)
    build_claims.sweep(store, sorted(graph.present))


def at_end(store: Store, graph: Graph, run: str, older_than_s: float) -> None:
    """Remove the leftovers of a build that has succeeded after kills."""
    store.remove_unfinished(older_than_s)
    for key in spent_journals(graph, store.list(_JOURNAL), all_done=True):
        store.delete(key)
    build_claims.sweep(store, sorted(store.list(_CLAIMS)), run)
