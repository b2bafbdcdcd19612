"""How long it takes to read the state of a build with 2,000 shards: from a folder and from SeaweedFS, cold and warm.

    python benchmarks/state.py [--shards 2000] [--phase generating|training|finished] [--s3]

Cold reads everything; `kept` is a new process with the file that an earlier one kept; warm is the next look of the same
reader, after one heartbeat has changed (in a finished build none does). `parts` is what a page computes beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

from draftmill.state.jobs import picture_of
from draftmill.state.metrics import metrics
from draftmill.state.quality import quality
from draftmill.state.read import Reader
from draftmill.state.shards import shard_rows
from draftmill.state.state import state_from
from draftmill.state.training import training
from draftmill.store.base import Store
from draftmill.store.local import LocalStore
from draftmill.store.open import open_store
from tests.state.made_store import MadeStore, Phase


def timed(name: str, work: Callable[[], Any], repeat: int = 1) -> Any:
    """The best of some runs, printed."""
    best, result = float("inf"), None
    for _ in range(repeat):
        begun = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - begun)
    print(f"  {name:<28} {best:7.3f} s", flush=True)
    return result


def measure(store: Store, made: MadeStore, kept: Path) -> None:
    now = time.time()

    def cold() -> Reader:
        reader = Reader(store, cache=kept)
        look(reader)
        return reader

    def look(reader: Reader) -> Any:
        picture = picture_of(reader.snapshot(), now)
        assert picture is not None
        return picture, state_from(picture)

    def warm(reader: Reader) -> Any:
        if made.phase != "finished":
            made.tick(store)
        return timed_look(reader)

    def timed_look(reader: Reader) -> Any:
        begun = time.perf_counter()
        found = look(reader)
        times.append(time.perf_counter() - begun)
        return found

    times: list[float] = []
    reader = timed("cold", cold)
    print(f"  {'objects fetched':<28} {reader.fetched:7d}")
    timed("kept", cold)
    for _ in range(5):
        picture, state = warm(reader)
    print(f"  {'warm (worst of 5)':<28} {max(times):7.3f} s")
    timed("  of it the listing", store.list, 3)
    timed("  of it counting", lambda: state_from(type(picture)(picture.snapshot, picture.plan, picture.now)), 3)
    timed("parts: quality", lambda: quality(picture), 3)
    timed("parts: shard rows", lambda: shard_rows(picture), 3)
    timed("parts: training", lambda: training(reader, picture), 3)
    timed("parts: metrics", lambda: metrics(state), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--phase", choices=get_args(Phase), default="generating", help="How far the build is.")
    parser.add_argument("--s3", action="store_true", help="Measure a store on SeaweedFS too.")
    arguments = parser.parse_args()
    made = MadeStore(shards=arguments.shards, now=time.time(), phase=arguments.phase)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{made.shards} shards, {made.phase}, {len(made.objects)} objects, a folder")
        measure(LocalStore(made.write(folder / "store")), made, folder / "kept.json")
        if arguments.s3:
            _measure_s3(made, folder)


def _measure_s3(made: MadeStore, folder: Path) -> None:
    from draftmill.store.settings import S3Settings
    from tests.s3.weed import Weed

    with Weed(folder / "weed") as weed:
        os.environ.update(weed.environment)
        store = open_store(weed.url("made"), S3Settings(path_style=True))
        made.upload(store)
        print(f"{made.shards} shards, {made.phase}, {len(made.objects)} objects, SeaweedFS on loopback")
        measure(store, made, folder / "kept-s3.json")


if __name__ == "__main__":
    main()
