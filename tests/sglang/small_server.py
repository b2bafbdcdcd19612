"""A small server with SGLang's routes, answers that follow from the prompt's ids, and bad manners on command.

`python -m tests.sglang.small_server --port 0 --record FILE` prints its port and serves until it is killed. Everything is
real but the model: a process, HTTP, answers that take their time. POST /misbehave {"mode": ..., "rows": n} spoils the
next n rows (all of them for null) in one of these ways:

    slow         ten times the time              hang      no answer, and no token moves
    500, 503     the status                      abort     finish reason abort (HTTP 200)
    empty        no token, finish reason stop    count     completion_tokens is wrong
    zeros        id 0 again and again ("!!!!")   garbage   other tokens than the prompt's own
    reset        the connection breaks           die       the process kills itself
    html         200 with something else         well      good manners again

With `--row-seconds S --row-tokens N` every row takes S seconds and has N tokens (a shorter one, such as the canary's, takes
less), at next to no CPU: a server whose rate is known, in flight over S.

Each answered row is one line of the record file ({"prompt", "seed", "tokens", "canary"}), written before the reply leaves,
so that a test can count what was generated, also by servers that were killed since.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time

from aiohttp import web

VOCABULARY = 260
CONTEXT = 512


def expected(prompt: list[int], parameters: dict, vocabulary: int = VOCABULARY) -> tuple[list[int], str]:
    """The ids and finish reason that a well server gives."""
    seed = 0 if parameters["temperature"] == 0 else parameters.get("sampling_seed") or 0
    digest = hashlib.sha256(json.dumps([prompt, seed]).encode()).digest()
    stop, limit = parameters["stop_token_ids"], parameters["max_new_tokens"]
    length = 3 + int.from_bytes(digest[:2], "big") % (2 * limit)
    plain = [token for token in range(vocabulary) if token not in stop]
    ids = [plain[(digest[2 + n % 30] + 31 * n) % len(plain)] for n in range(min(length, limit))]
    if length <= limit:
        ids[-1] = stop[0]
        return ids, "stop"
    return ids, "length"


class Small:
    """The server's state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.mode, self.rows = options.mode, None
        self.running: dict[str, asyncio.Task] = {}
        self.decoded = 0
        self.waiting = set()
        self.record = os.open(options.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if options.record else -1

    # Rows

    def manner(self, canary: bool) -> str:
        if self.mode == "well" or (canary and self.options.spare_canary):
            return "well"
        if self.rows is None:
            return self.mode
        if self.rows == 0:
            self.mode, self.rows = "well", None
            return "well"
        self.rows -= 1
        return self.mode

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked.get("stream"):
            return error(400, "streams are not spoken here")
        prompt, parameters = asked["input_ids"], asked["sampling_params"]
        if len(prompt) > self.options.context:
            return error(
                400,
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({self.options.context} tokens).",
            )
        if max(prompt, default=0) >= self.options.vocabulary:
            # The real one does not refuse it: the scheduler dies of it, and everything with it.
            os.kill(os.getpid(), signal.SIGKILL)
        self.running[asked["rid"]] = asyncio.current_task()
        try:
            return await self.answer(request, asked, prompt, parameters)
        finally:
            self.running.pop(asked["rid"], None)

    async def answer(self, request, asked, prompt, parameters):
        canary = parameters["temperature"] == 0
        manner = self.manner(canary)
        if manner in ("500", "503"):
            return web.json_response(
                {"object": "error", "message": "out of order", "code": int(manner)}, status=int(manner)
            )
        if manner == "html":
            return web.Response(text="<html>ok</html>")
        if manner == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if manner == "reset":
            request.transport.abort()
            return web.Response()
        if manner == "hang":
            await asyncio.sleep(3600)
        if self.options.row_seconds:
            ids, reason = self.fixed(parameters), "stop"
            await asyncio.sleep(self.options.row_seconds * len(ids) / self.options.row_tokens)
            self.decoded += len(ids)
        else:
            ids, reason = expected(prompt, parameters, self.options.vocabulary)
            await self.decode(len(ids) * (10 if manner == "slow" else 1))
        said = len(ids)
        if manner == "abort":
            reason = "abort"
        elif manner == "empty":
            ids, said, reason = [], 0, "stop"
        elif manner == "count":
            said += 1
        elif manner == "zeros":
            ids = [0] * parameters["max_new_tokens"]
            said, reason = len(ids), "length"
        elif manner == "garbage":
            ids = [*reversed(ids[:-1]), ids[-1]]
        finish = {"type": reason, "matched": ids[-1]} if reason == "stop" and ids else {"type": reason, "length": said}
        if reason == "abort":
            finish = {"type": "abort", "message": "Aborted", "status_code": None}
        self.note(prompt, parameters, said, canary)
        return web.json_response(
            {
                "text": "",
                "output_ids": ids,
                "meta_info": {
                    "id": asked["rid"],
                    "finish_reason": finish,
                    "prompt_tokens": len(prompt),
                    "completion_tokens": said,
                    "cached_tokens": 0,
                    "reasoning_tokens": 0,
                    "num_retractions": 0,
                    "weight_version": "default",
                    "e2e_latency": 0.0,
                },
            }
        )

    def fixed(self, parameters) -> list[int]:
        stop, tokens = parameters["stop_token_ids"], min(self.options.row_tokens, parameters["max_new_tokens"])
        plain = [token for token in range(256) if token not in stop]
        return [plain[n % len(plain)] for n in range(tokens - 1)] + stop[:1]

    async def decode(self, tokens: int) -> None:
        """Take the time that so many tokens take; the server's count moves meanwhile."""
        if not self.options.token_seconds:
            self.decoded += tokens
            return
        left = tokens
        while left > 0:
            step = min(left, max(1, int(self.options.step_seconds / self.options.token_seconds)))
            await asyncio.sleep(step * self.options.token_seconds)
            self.decoded += step
            left -= step

    def note(self, prompt, parameters, tokens, canary) -> None:
        if self.options.access_log and not canary:
            print('"POST /generate HTTP/1.1" 200 OK', flush=True)
        if self.record >= 0:
            digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
            row = {"prompt": digest, "seed": parameters.get("sampling_seed"), "tokens": tokens, "canary": canary}
            os.write(self.record, json.dumps(row).encode() + b"\n")

    # The other routes

    async def misbehave(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.mode, self.rows = asked["mode"], asked.get("rows")
        return web.json_response({"mode": self.mode})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        limits = {"context_length": self.options.context, "max_total_num_tokens": 10**6, "max_req_input_len": 500}
        states = [{"last_gen_throughput": 1.0, "effective_max_running_requests_per_dp": 512}]
        return web.json_response(
            {"model_path": self.options.model, "version": "small", **limits, "internal_states": states}
        )

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.options.model, "is_generation": True})

    async def metrics(self, request: web.Request) -> web.Response:
        if self.options.no_metrics:
            return web.Response(status=404)
        labels = f'model_name="{self.options.model}",mode="decode"'
        return web.Response(
            text="# TYPE sglang:realtime_tokens_total counter\n"
            f"sglang:realtime_tokens_total{{{labels}}} {float(self.decoded)}\n"
            f"sglang:num_running_reqs{{}} {len(self.running)}\n"
        )

    async def abort(self, request: web.Request) -> web.Response:
        task = self.running.get((await request.json()).get("rid", ""))
        if task is not None:
            task.cancel()
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def serve(options: argparse.Namespace) -> None:
    if options.start_seconds:
        await asyncio.sleep(options.start_seconds)
    small, app = Small(options), web.Application(client_max_size=2**26)
    app.router.add_post("/generate", small.generate)
    app.router.add_post("/misbehave", small.misbehave)
    app.router.add_post("/abort_request", small.abort)
    for path, route in {
        "/health": small.health,
        "/health_generate": small.health,
        "/server_info": small.info,
        "/get_server_info": small.info,
        "/model_info": small.model,
        "/get_model_info": small.model,
        "/metrics": small.metrics,
        "/flush_cache": small.flush,
    }.items():
        app.router.add_get(path, route)
    # A client that goes away aborts its row, as SGLang does.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", options.port, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    while options.parent == 0 or os.getppid() == options.parent:
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="model")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--row-seconds", type=float, default=0.0, help="time of every row, whatever its tokens")
    parser.add_argument("--row-tokens", type=int, default=160, help="tokens of a row where --row-seconds is set")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="how often the count of tokens moves")
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--record", default="")
    parser.add_argument("--mode", default="well", help="manners from the start")
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--access-log", action="store_true", help="print a line for each answered row, as uvicorn does")
    parser.add_argument("--spare-canary", action="store_true", help="misbehave to rows only")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is the parent no more")
    options, _ = parser.parse_known_args()
    started = time.monotonic()
    try:
        asyncio.run(serve(options))
    except OSError as failed:
        sys.exit(f"small server: {failed} after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
