"""How long GPUs wait between two jobs, which is time that the jobs cost although none of them spans it.

A server of the build answers rows of the next shard meanwhile, so a shard's rows are done in the time of several jobs and
of the waits between them. Only with the waits do the times of all jobs add up to the time that all their rows took.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[Sequence[str], float, float]
"""The GPUs of a job, or the server of others that it asked, and when it began and ended."""

# After a longer time nothing was at work: a pause, which no job is to blame for.
_PAUSE_S = 60.0


def waits(spans: Sequence[Span]) -> list[float]:
    """For each job the seconds between the end of the job before it on its GPUs and its beginning; 0 behind a pause."""
    found, reached = [0.0] * len(spans), dict[str, float]()
    for place in sorted(range(len(spans)), key=lambda place: spans[place][1]):
        gpus, begun, ended = spans[place]
        wait = begun - max((reached[gpu] for gpu in gpus if gpu in reached), default=begun)
        found[place] = wait if 0 < wait <= _PAUSE_S else 0.0
        reached |= {gpu: max(ended, reached.get(gpu, ended)) for gpu in gpus}
    return found
