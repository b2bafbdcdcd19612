"""Plan once with Snakemake in this process and sample its stack: what share of the time is in code of ours?

Sampling costs next to nothing, so that the shares are those of an undisturbed plan. A moment is ours if a function of
draftmill or of rules/ is anywhere on the stack, whatever it called; the Snakefile's own top level, from which
Snakemake's rule definitions are called, counts as ours too. Imports of libraries by us are ours as well.

python -m benchmarks.planning.sampled OUT.json SNAKEMAKE-ARGUMENT...
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
_OURS = (f"{ROOT}/draftmill/", f"{ROOT}/rules/", f"{ROOT}/Snakefile", f"{ROOT}/snakemake_storage_plugin")
_INTERVAL_S = 0.01


class Sampler(threading.Thread):
    """Counts samples of the main thread, ours by outermost and innermost function."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples, self.ours = 0, 0
        self.outermost: Counter[str] = Counter()
        self.innermost: Counter[str] = Counter()
        self._main, self._end = threading.get_ident(), threading.Event()

    def run(self) -> None:
        while not self._end.wait(_INTERVAL_S):
            frame = sys._current_frames().get(self._main)
            self.samples += 1
            mine = [_name(f) for f in _stack(frame) if f.f_code.co_filename.startswith(_OURS)]
            if mine:
                self.ours += 1
                self.outermost[mine[-1]] += 1
                self.innermost[mine[0]] += 1

    def stop(self) -> None:
        self._end.set()
        self.join()


def _stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


def main() -> None:
    out, arguments = Path(sys.argv[1]), sys.argv[2:]
    sampler = Sampler()
    sampler.start()
    from snakemake.cli import main as snakemake

    try:
        snakemake(arguments)
    except SystemExit as end:
        if end.code:
            raise
    sampler.stop()
    found = {
        "samples": sampler.samples,
        "ours": sampler.ours,
        "outermost": sampler.outermost.most_common(12),
        "innermost": sampler.innermost.most_common(12),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
