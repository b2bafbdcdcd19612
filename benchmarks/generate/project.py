"""A build of its own folder that generates on managed SGLang servers: what the benchmark and the kills run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
# Real answers of a small model repeat themselves; what the audit thinks of them is not measured here.
LAX = {
    "max_repetitive": 1.0,
    "max_short": 1.0,
    "max_spike": 1.0,
    "max_empty": 1.0,
    "min_mean_loss_tokens": 1.0,
    "max_duplicates": 1.0,
    "max_rejected": 0.5,
}


@dataclass(frozen=True)
class Host:
    """Where SGLang is on this host: interpreter, environment and flags of its server, or a stand-in's command line."""

    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    gate: dict[str, Any] = field(default_factory=dict)


class GpuProject:
    """A folder with prompts and a configuration, built by the repository's own Snakefile on so many GPUs."""

    def __init__(
        self, folder: Path, host: Host, model: str, prompts: Sequence[str], *, context: int = 2048, gpus: int = 1
    ) -> None:
        self.folder, self.host, self.model, self.context, self.gpus = folder, host, model, context, gpus
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))

    def configure(
        self,
        *,
        shard_rows: int,
        in_flight: int = 512,
        server: dict[str, Any] | None = None,
        sglang: dict[str, Any] | None = None,
        retries: int = 1,
        **generate: Any,
    ) -> None:
        host = self.host
        own = {"python": host.python, "environment": host.environment, "flags": host.flags, **(server or {})}
        if host.command is not None:
            own["command"] = list(host.command)
        values = {
            "device": "cuda",
            "store": "build",
            "target": {"model": self.model, "context_length": self.context},
            "prompts": {
                "sources": [{"path": "prompts.jsonl"}],
                "shard_rows": shard_rows,
                "held_out": 0.1,
                "max_bad": 0.5,
            },
            "generate": {
                "engine": "sglang",
                "temperature": 0.8,
                "top_p": 1.0,
                "top_k": 0,
                "flush_rows": 256,
                "flush_seconds": 5,
                **generate,
                "sglang": {"in_flight": in_flight, **(sglang or {}), "server": own},
            },
            "audit": LAX,
            "hidden": {"taps": [0, 2]},
            "drafter": {"layers": 1, "block_size": 4},
            "resources": {"gpu_retries": retries},
            "gate": host.gate,
        }
        self.config_path.write_text(yaml.safe_dump(values), encoding="utf-8")

    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    @contextmanager
    def inside(self) -> Any:
        """The project's folder as the working folder, which its configuration's paths are relative to."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(before)

    def graph(self) -> Any:
        """The build's graph over its store as it is now; prompts are published."""
        from draftmill.config import load
        from draftmill.store.open import open_store
        from draftmill.workflow import current_index, graph_of

        with self.inside():
            config = load(self.config_path)
            store = open_store(config.store)
            current_index(config, store, write=True)
            return graph_of(config, store)

    def environment(self, marked: bool = False) -> dict[str, str]:
        """The environment of a build; `marked`: this process is the builder, so that servers outlive Snakemake."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTMILL_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        found = {**kept, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if marked:
            from draftmill.gpu import processes
            from draftmill.job import BUILDER_VARIABLE, RUN_VARIABLE

            me = processes.myself()
            mark = f"{processes.boot_id()} {processes.pid_namespace()} {me.pid} {me.start}"
            found |= {RUN_VARIABLE: f"visit{os.getpid()}", BUILDER_VARIABLE: mark}
        return found

    def command(self, targets: Sequence[str]) -> list[str]:
        words = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        words += ["--directory", str(self.folder), "--configfile", str(self.config_path)]
        words += ["--resources", f"gpu={self.gpus}", "--cores", str(8 * self.gpus)]
        return [*words, *targets]

    def start(self, targets: Sequence[str], log: Path, marked: bool = False) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                self.command(targets), cwd=self.folder, env=self.environment(marked), stdout=out, stderr=out
            )

    def build(self, targets: Sequence[str], log: Path, marked: bool = False) -> float:
        """Build and wait; returns seconds. Raises RuntimeError with the end of the logs."""
        began = time.monotonic()
        process = self.start(targets, log, marked)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait(timeout=60)
            raise
        if status:
            raise RuntimeError(
                f"snakemake ended with {status}\n{log.read_text(errors='replace')[-3000:]}\n{self.logs()}"
            )
        return time.monotonic() - began

    def logs(self) -> str:
        """The ends of all job and server logs."""
        found = sorted((self.folder / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-800:]}" for path in found[-8:])

    def cli(self, *arguments: str, timeout: float, marked: bool = False, times: int = 1) -> list[str]:
        """Run the `draftmill` command so many times at once; returns what each printed. Raises RuntimeError if one fails."""
        words = [sys.executable, "-m", "draftmill", *arguments]
        how: dict[str, Any] = {"cwd": self.folder, "env": self.environment(marked), "text": True}
        end = time.monotonic() + timeout
        started = [
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how) for _ in range(times)
        ]
        try:
            said = [one.communicate(timeout=max(end - time.monotonic(), 0.1))[0] for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        for one, words_said in zip(started, said, strict=True):
            if one.returncode:
                raise RuntimeError(f"draftmill {arguments[0]} ended with {one.returncode}: {words_said[-3000:]}")
        return said

    # What came out ----------------------------------------------------------------------------------------------------

    def rows(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """All rows of completions in the store."""
        import pyarrow.parquet as pq

        columns = ["prompt_id", "sample", "output_ids", "finish_reason"]
        return [row for key in keys for row in pq.read_table(self.folder / "build" / key, columns=columns).to_pylist()]

    def forget(self, shards: Sequence[str]) -> None:
        """Remove what was generated of shards, finished or not."""
        graph, store = self.graph(), self.folder / "build"
        fingerprint = graph.specs.fp["generate"]
        for shard in shards:
            (store / graph.completions(shard)).unlink(missing_ok=True)
            (store / graph.rejected(shard)).unlink(missing_ok=True)
            shutil.rmtree(store / f"journal/generate/{shard}-{fingerprint}", ignore_errors=True)

    def journalled(self, graph: Any, shards: Sequence[str]) -> int:
        """Output tokens that are in the journals of unfinished shards already."""
        from draftmill import layout
        from draftmill.store.journal import Journal
        from draftmill.store.open import open_store

        store, found = open_store(str(self.folder / "build")), 0
        for shard in shards:
            rows = Journal(store, layout.journal("generate", f"{shard}-{graph.specs.fp['generate']}")).rows()
            found += sum(len(row.get("output_ids", ())) for row in rows)
        return found

    def accounted(self, graph: Any, shards: Sequence[str], samples: int) -> dict[str, Any]:
        """Whether every prompt of the shards is there exactly once a sample, as a completion or a rejection."""
        import pyarrow.parquet as pq

        store, seen, wanted = self.folder / "build", Counter[tuple[str, int]](), set[tuple[str, int]]()
        completed = rejected = 0
        for shard in shards:
            ids = pq.read_table(store / graph.prompts(shard), columns=["prompt_id"])["prompt_id"].to_pylist()
            wanted |= {(prompt, sample) for prompt in ids for sample in range(samples)}
            for name, key in (("completed", graph.completions(shard)), ("rejected", graph.rejected(shard))):
                table = pq.read_table(store / key, columns=["prompt_id", "sample"]).to_pylist()
                seen.update((row["prompt_id"], row["sample"]) for row in table)
                completed += len(table) * (name == "completed")
                rejected += len(table) * (name == "rejected")
        return {
            "wanted": len(wanted),
            "completed": completed,
            "rejected": rejected,
            "missing": len(wanted - set(seen)),
            "twice": sum(count > 1 for count in seen.values()),
            "strange": len(set(seen) - wanted),
        }

    def requests(self, shards: Sequence[str]) -> list[bytes]:
        """The bodies of `/generate` for all rows of the shards, as the build asks them."""
        from draftmill.config import load
        from draftmill.engines import sglang_api
        from draftmill.schemas import PROMPTS, read_rows
        from draftmill.stages.asking import read_target, sort_rows

        with self.inside():
            config = load(self.config_path)
            target = read_target(config)
            stop = sorted(target.rules.stop_ids)
            bodies = []
            for shard in shards:
                _, asked, _ = sort_rows(read_rows(Path(f"build/prompts/{shard}.parquet"), PROMPTS), config, target)
                for one in asked:
                    body = sglang_api.body(one.request(config.generate.seed, 0), stop, f"bare-{len(bodies)}")
                    bodies.append(json.dumps(body).encode())
            return bodies

    def server_urls(self) -> list[str]:
        """The addresses of the living servers of this project's leases. Raises RuntimeError unless each GPU has one."""
        from draftmill.engines import server_record
        from draftmill.gpu import lease

        found = list(server_record.records(server_record.folder(lease.lock_dir(self.host.gate["lock_dir"]))))
        if len(found) != self.gpus:
            raise RuntimeError(f"{len(found)} servers are there for {self.gpus} GPUs\n{self.logs()}")
        return [record.url for record in found]
