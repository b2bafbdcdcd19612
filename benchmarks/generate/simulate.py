"""Jobs, lane and shards against a server of known rate: how much of it do they use?

Usage: python benchmarks/generate/simulate.py FOLDER [--help]

No GPU: the small server of the tests answers each row after a fixed time, so that its rate is in flight over that time. Jobs
run one after another with a pause between, as Snakemake's do. The bare client asks for the same rows. Prints one
JSON object: both rates, the ratio, the seconds between the first row and the last published shard, and how many rows were in
flight at the server twice a second; the lane's own account is FOLDER/lane.log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from draftmill import layout  # noqa: E402
from draftmill.gpu import processes  # noqa: E402
from draftmill.job import BUILDER_VARIABLE, RUN_VARIABLE  # noqa: E402
from draftmill.prompts.record import identify  # noqa: E402
from draftmill.schemas import PROMPTS, write_rows  # noqa: E402
from draftmill.store.local import LocalStore  # noqa: E402
from tests.sglang.servers import start  # noqa: E402
from tests.sglang.shard_job import GENERATE  # noqa: E402
from tests.tiny import config_values, make_target, prompt_texts  # noqa: E402


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tree", default=str(ROOT), help="the code that is measured")
    parser.add_argument("--model", help="a folder with a tokenizer (default: a tiny one is made)")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=320, help="prompts a shard")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--row-seconds", type=float, default=2.0)
    parser.add_argument("--row-tokens", type=int, default=160)
    parser.add_argument("--gap", type=float, default=7.0, help="seconds between two jobs' processes")
    return parser.parse_args()


class Simulation:
    """Shards in a folder, a server, and the environment of jobs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder.resolve()
        self.store = LocalStore(self.folder / "store")
        self.model = Path(options.model) if options.model else self.folder / "target"
        if not options.model:
            make_target(self.model, layers=1)
        how = ["--row-seconds", str(options.row_seconds), "--row-tokens", str(options.row_tokens), "--context", "4096"]
        how += ["--vocabulary", "1000000"]
        self.server, port = start(self.folder / "record", *how)
        self.url = f"http://127.0.0.1:{port}"
        self.shards = [f"{number:012x}" for number in range(options.shards)]
        for number, shard in enumerate(self.shards):
            texts = prompt_texts(options.prompts, seed=number)
            found = [identify({"messages": [{"role": "user", "content": text}]}) for text in texts]
            rows = [{"prompt_id": p.prompt_id, "source": "chat", "record": p.text} for p in found]
            write_rows(self.store.path(layout.prompts(shard)), PROMPTS, rows, {})
        sglang = {"urls": [self.url], "in_flight": options.in_flight, "idle_seconds": 20.0}
        generate = {
            "engine": "sglang", "samples": options.samples, "max_new_tokens": 256, "temperature": 0.8,
            "flush_rows": 256, "flush_seconds": 5, "sglang": sglang,
        }  # fmt: skip
        target = {"model": str(self.model), "context_length": 2048}
        values = config_values(store="store", target=target, generate=generate)
        (self.folder / "config.json").write_text(json.dumps(values))
        me = processes.myself()
        self.environment = {
            **os.environ,
            RUN_VARIABLE: secrets.token_hex(6),
            BUILDER_VARIABLE: f"{processes.boot_id()} {processes.pid_namespace()} {me.pid} {me.start}",
            "PYTHONPATH": options.tree,
            "OMP_NUM_THREADS": "1",
        }

    def running(self) -> int:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as reply:
            found = re.search(r"num_running_reqs\{\} (\d+)", reply.read().decode())
        return int(found[1]) if found else 0

    def job(self, number: int) -> float:
        words = [sys.executable, "-m", "tests.sglang.shard_job", "config.json", *self.shards[number:]]
        began = time.monotonic()
        with (self.folder / "job.log").open("ab") as log:
            subprocess.run(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log, check=True)
        return round(time.monotonic() - began, 1)

    def jobs(self) -> list[float]:
        found = []
        for number in range(len(self.shards)):
            if number:
                time.sleep(self.options.gap)
            found.append(self.job(number))
        return found

    def bare(self) -> dict[str, Any]:
        sampling = {"max_new_tokens": 256, "temperature": 0.8, "stop_token_ids": [7]}
        rows = self.options.shards * self.options.prompts * self.options.samples
        bodies = [
            {"rid": str(n), "input_ids": list(range(60)), "stream": False, "sampling_params": sampling}
            for n in range(rows)
        ]
        path = self.folder / "bodies.jsonl"
        path.write_text("\n".join(json.dumps(body) for body in bodies))
        words = [sys.executable, str(ROOT / "benchmarks/generate/bare.py"), self.url, str(path)]
        done = subprocess.run([*words, str(self.options.in_flight)], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))


class Samples:
    """Rows in flight at the server, twice a second."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._over = simulation, threading.Event()
        self.found: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(0.5):
            self.found.append((time.time(), self._simulation.running()))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    options = parsed()
    options.folder.mkdir(parents=True)
    simulation = Simulation(options)
    try:
        samples = Samples(simulation)
        seconds = simulation.jobs()
        samples.end()
        ended = max(
            simulation.store.path(layout.completions(shard, GENERATE)).stat().st_mtime for shard in simulation.shards
        )
        first = next(at for at, running in samples.found if running > 1) - 0.25
        alone = simulation.bare()
    finally:
        simulation.server.kill()
        simulation.server.wait()
    rate = alone["tokens"] / (ended - first)
    print(json.dumps({
        "job_seconds": seconds,
        "build": {"seconds": round(ended - first, 2), "tokens_per_second": round(rate, 1)},
        "bare": {"seconds": alone["seconds"], "tokens_per_second": alone["tokens_per_second"]},
        "limit_seconds": alone["rows"] * options.row_seconds / options.in_flight,
        "ratio": round(rate / alone["tokens_per_second"], 4),
        "in_flight": " ".join(str(running) for at, running in samples.found if first <= at <= ended),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
