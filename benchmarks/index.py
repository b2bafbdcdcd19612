"""What the prompt index costs at its real size: 914,000 prompts in about 1.5 GB of JSONL, seeded.

    python benchmarks/index.py [--prompts N] [--shard-rows N] [--folder DIR]

Prints the wall time and peak memory (parent and workers together) of the first index with its shards written, of a
look at unchanged sources, and of one edited prompt with the shards that it changed. Each step is a process of its own,
as a build is. The set lies in a temporary folder unless one is named, where it is kept for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SEED = 914
FILES = 4
MEAN_BYTES = 1500
_WORDS = 40_000
_SIGNS = ("\n", '"quoted"', "Grüße", "naïve", "\\frac{1}{2}", "日本語の文", "→", "🙂", "\t", "</s>")


def text_pool(generator: random.Random) -> str:
    """Words of varying length with what has to be escaped or encoded, long enough to cut any prompt from."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 11))) for _ in range(_WORDS)]
    for place in range(0, _WORDS, 40):
        words[place] = generator.choice(_SIGNS)
    return " ".join(words)


def records(count: int, generator: random.Random) -> Iterator[dict[str, object]]:
    """Chats of one to three turns; one in fifty is a copy of an earlier one, one in a thousand is bad."""
    pool = text_pool(generator)
    last: dict[str, object] = {"prompt": "the first"}
    for number in range(count):
        if number % 1000 == 999:
            yield {"messages": []}
        elif number % 50 == 49:
            yield last
        else:
            turns = generator.choice((1, 1, 1, 3))
            sizes = [int(generator.expovariate(turns / MEAN_BYTES)) + 20 for _ in range(turns)]
            starts = [generator.randrange(len(pool) - 40_000) for _ in sizes]
            texts = [f"{number} {pool[start : start + size]}" for start, size in zip(starts, sizes, strict=True)]
            last = {
                "id": number,
                "messages": [
                    {"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)
                ],
            }
            yield last


def make(folder: Path, count: int) -> None:
    """Write the set once; a folder that holds it already is left alone."""
    done = folder / f"{count}.made"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(SEED)
    made = records(count, generator)
    for part in range(FILES):
        share = count // FILES + (part < count % FILES)
        with (folder / f"part-{part}.jsonl").open("w", encoding="utf-8") as stream:
            for _ in range(share):
                stream.write(json.dumps(next(made), ensure_ascii=part % 2 == 0) + "\n")
    done.touch()


def measure(store: str, sources: str, shard_rows: int, write: bool) -> None:
    """One look at the sources as a process of its own; says its seconds and its shards as JSON."""
    from draftmill.config import parse
    from draftmill.prompts.index import bring_up_to_date, kin
    from draftmill.store.open import open_store

    prompts = {"sources": [{"path": f"{sources}/part-*.jsonl"}], "shard_rows": shard_rows}
    config = parse({"device": "cpu", "store": store, "target": {"model": "target"}, "prompts": prompts})
    opened, started = open_store(store), time.monotonic()
    index = bring_up_to_date(
        config,
        opened,
        write=write,
        limit_tokens=260_000,
        tokenizer="none",
        count_tokens=len,
        cache_dir=Path(sources) / "cache",
    )
    seconds = time.monotonic() - started
    said = {"seconds": seconds, "shards": {shard.name: shard.rows for shard in index.shards}, "kin": kin(index, opened)}
    print(json.dumps(said | {"prompts": sum(said["shards"].values())}))


class Step:
    """A measured process: its wall time, and the largest resident memory of it and its workers together."""

    def __init__(self, store: Path, sources: Path, shard_rows: int, *, write: bool = True) -> None:
        command = [sys.executable, __file__, "--measure", str(store), str(sources), str(shard_rows), str(int(write))]
        started = time.monotonic()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.peak_bytes = 0
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        output, _ = self._process.communicate()
        self.wall = time.monotonic() - started
        sampler.join()
        if self._process.returncode:
            sys.exit(f"the measured process ended with {self._process.returncode}")
        self.said = json.loads(output)

    def _sample(self) -> None:
        while self._process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, sum(map(resident, session(self._process.pid))))
            time.sleep(0.1)

    def __str__(self) -> str:
        peak = self.peak_bytes / 2**20
        return f"{self.said['seconds']:6.2f} s, {self.wall:6.2f} s with start and imports, peak {peak:,.0f} MiB"


def session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                    yield int(entry.name)
            except (OSError, IndexError):
                continue


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def edit(path: Path) -> tuple[int, int]:
    """Change one letter of the prompt in the middle of a file; its place and what stood there."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        stream.readline()
        start = stream.tell()
        place = start + stream.readline().index(b'"content": "') + len(b'"content": "')
        stream.seek(place)
        old = stream.read(1)[0]
        write_byte(path, place, ord("9") if old != ord("9") else ord("8"))
    return place, old


def write_byte(path: Path, place: int, value: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(bytes([value]))


def load() -> str:
    return f"load {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores"


def run(folder: Path, count: int, shard_rows: int) -> None:
    sources, store = folder / "sources", Path(tempfile.mkdtemp(prefix="store-", dir=folder))
    make(sources, count)
    (sources / "cache" / "digests.json").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in sources.glob("part-*.jsonl"))
    print(f"{count:,} records, {size / 2**30:.2f} GiB in {FILES} files; {load()}", flush=True)
    first = Step(store, sources, shard_rows)
    print(
        f"index and shards  {first}; {len(first.said['shards'])} shards, {first.said['prompts']:,} prompts", flush=True
    )
    print(f"unchanged, build  {Step(store, sources, shard_rows)}")
    print(f"unchanged, plan   {Step(store, sources, shard_rows, write=False)}; {load()}", flush=True)
    path = sources / "part-1.jsonl"
    place, old = edit(path)
    try:
        print(f"one edit, plan    {Step(store, sources, shard_rows, write=False)}")
        after = Step(store, sources, shard_rows)
    finally:
        write_byte(path, place, old)
    print(f"one edit, build   {after}; {load()}")
    changed(first.said, after.said)
    shutil.rmtree(store)


def changed(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> None:
    for name in sorted(before["shards"].keys() - after["shards"].keys()):
        print(f"  gone: {name}, {before['shards'][name]} prompts")
    for name in sorted(after["shards"].keys() - before["shards"].keys()):
        kin = after["kin"].get(name, {})
        shared = {other: sum(stop - start for start, stop in ranges) for other, ranges in kin.items()}
        print(f"  new:  {name}, {after['shards'][name]} prompts, shared with {shared}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), bool(int(sys.argv[5])))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=914_000)
    parser.add_argument("--shard-rows", type=int, default=456)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftmill-index-") as temporary:
        run(given.folder or Path(temporary), given.prompts, given.shard_rows)
