"""Steps of a visit that measure and record: a server's rates, its replies, greedy agreement, the build's benchmark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.generate import run as benchmark
from benchmarks.generate.project import GpuProject
from tests.gpu.visit import StepFailed, Visit

GREEDY_PROMPTS, GREEDY_TOKENS = 64, 96


def measure(visit: Visit) -> None:
    """A cold start, then tokens a second at several loads, by the command that people use."""
    project = visit.project("bench", len(visit.prompts), visit.args.samples)

    def work() -> Any:
        out = visit.out / "bench_generate.json"
        (said,) = project.cli(
            "bench", "generate", "--configfile", "config.yaml", "--prompts", str(4 * visit.args.in_flight),
            "--in-flight", visit.args.loads, "--gpus", str(visit.args.gpus), "--keep", "--out", str(out), timeout=260,
            marked=True,
        )  # fmt: skip
        return {"said": said.splitlines(), "host_gib": [round(r.host_bytes / 2**30, 1) for r in visit.records()]}

    visit.step("measure", work, 270)


def exchanges(visit: Visit) -> None:
    """What the real server replies, for a stand-in to be held against."""
    project = visit.project("bench", len(visit.prompts), visit.args.samples)

    def work() -> Any:
        benchmark.warm(project, 170)
        url = project.server_urls()[0]
        found = [exchange(url, method, path, body) for method, path, body in asked(project, visit)]
        (visit.out / "exchanges.json").write_text(json.dumps(found, indent=1) + "\n")
        return {"exchanges": len(found), "statuses": [one["status"] for one in found]}

    visit.step("exchanges", work, 200)


def asked(project: GpuProject, visit: Visit) -> list[tuple[str, str, Any]]:
    graph = project.graph()
    bodies = [json.loads(body) for body in project.requests([graph.shards[0]])[:2]]
    one = bodies[0]
    short = {**one, "rid": "short", "sampling_params": {**one["sampling_params"], "max_new_tokens": 4}}
    greedy = {**one, "rid": "greedy", "sampling_params": {**one["sampling_params"], "temperature": 0.0}}
    long = {**one, "rid": "long", "input_ids": one["input_ids"] * (1 + 2 * visit.args.context // len(one["input_ids"]))}
    # No id outside the vocabulary: the server would die of it, and rows with one are refused before they are asked.
    negative = {**one, "rid": "negative", "sampling_params": {**one["sampling_params"], "temperature": -1.0}}
    routes = [("GET", path, None) for path in ("/health", "/model_info", "/server_info", "/metrics", "/nowhere")]
    rows = [("POST", "/generate", body) for body in (*bodies, short, greedy, long, negative, {"text": 5})]
    return [*routes, *rows, ("POST", "/abort_request", {"rid": "nobody"}), ("POST", "/flush_cache", {})]


def exchange(url: str, method: str, path: str, body: Any) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data, {"Content-Type": "application/json"} if data else {}, method=method
    )
    opened = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opened.open(request, timeout=30) as reply:
            status, text, kind = reply.status, reply.read(), reply.headers.get("Content-Type", "")
    except urllib.error.HTTPError as error:
        status, text, kind = error.code, error.read(), error.headers.get("Content-Type", "")
    except OSError as error:
        return {"method": method, "path": path, "body": body, "status": 0, "reply": repr(error)}
    decoded: Any = text.decode(errors="replace")[:20000]
    if "json" in kind:
        decoded = json.loads(text)
    return {"method": method, "path": path, "body": body, "status": status, "type": kind, "reply": decoded}


def greedy(visit: Visit) -> None:
    """Ids of greedy answers against transformers on the same weights, in a process of its own beside the server."""
    project = visit.project("bench", len(visit.prompts), visit.args.samples)

    def work() -> Any:
        benchmark.warm(project, 170)
        bodies = [json.loads(body) for body in project.requests(project.graph().shards[:2])]
        unique = list({tuple(body["input_ids"]): body for body in bodies}.values())[:GREEDY_PROMPTS]
        url, rows = project.server_urls()[0], []
        for body in unique:
            sampling = {**body["sampling_params"], "temperature": 0.0, "max_new_tokens": GREEDY_TOKENS}
            reply = exchange(url, "POST", "/generate", {**body, "sampling_params": sampling})
            rows.append(
                {
                    "prompt": body["input_ids"],
                    "output": reply["reply"]["output_ids"],
                    "stop": sampling["stop_token_ids"],
                }
            )
        path = visit.out / "greedy_rows.json"
        path.write_text(json.dumps(rows))
        script = Path(__file__).with_name("greedy_agreement.py")
        done = subprocess.run(
            [sys.executable, str(script), visit.args.model, str(path), str(GREEDY_TOKENS)],
            capture_output=True, text=True, timeout=150, check=False, env=project.environment(),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(done.stdout.strip().splitlines()[-1])

    visit.step("greedy", work, 280)


def pretend(project: GpuProject) -> None:
    """A pilot's record where nothing can be extracted, or need be: the plan multiplies by it, and waits for it."""
    path = project.folder / "build" / project.graph().pilot()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": 10, "tokens": 400}))


def bench(visit: Visit) -> None:
    """The build against the bare client."""
    args = visit.args
    project = visit.project("bench", len(visit.prompts), args.samples)
    if args.pretend_pilot:
        pretend(project)
    found = benchmark.whole(project, visit.out, args.samples, args.in_flight, visit.step, args.pretend_pilot)
    visit.figures["ratio"] = found
    print(f"build {found['build_tokens_per_second']} tokens/s, bare client {found['bare_tokens_per_second']} tokens/s, "
          f"ratio {found['ratio']} (wanted: {found['wanted']})", flush=True)  # fmt: skip
    if not found["reached"]:
        raise StepFailed("ratio")


def big(visit: Visit) -> None:
    """A random Qwen3 of 8B parameters, so that the GPU is what limits."""
    folder = visit.work / "qwen3-8b-random"

    def make() -> Any:
        script = Path(__file__).with_name("random_qwen3.py")
        subprocess.run([sys.executable, str(script), visit.args.model, str(folder)], check=True, timeout=180)
        return {"bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}

    visit.step("big_model", make, 190)
    model, visit.args.model = visit.args.model, str(folder)
    try:
        flags = {**visit.host.flags, "mem-fraction-static": 0.85}
        project = visit.project("big", 1500, 1, server={"flags": flags}, max_token_run=256)

        def work() -> Any:
            (said,) = project.cli(
                "bench", "generate", "--configfile", "config.yaml", "--prompts", str(3 * visit.args.in_flight),
                "--in-flight", f"{visit.args.in_flight // 2},{visit.args.in_flight}", "--out",
                str(visit.out / "bench_big.json"), timeout=330,
            )  # fmt: skip
            return {"said": said.splitlines()}

        visit.step("big", work, 340)
    finally:
        visit.args.model = model
        shutil.rmtree(folder, ignore_errors=True)
