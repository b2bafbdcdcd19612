"""The least that asks servers for rows: one asyncio client that keeps so many in flight at each and counts tokens.

Usage: python benchmarks/generate/bare.py URL[,URL...] BODIES.jsonl IN_FLIGHT

BODIES.jsonl holds the JSON of one `/generate` request a line. Prints one JSON object: rows, failures, output tokens,
seconds from the first request to the last answer, tokens a second. Nothing of draftmill is used: this is what the build
is held against. Bodies are encoded before the clock starts.
"""

import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp


async def run(urls: list[str], bodies: list[bytes], in_flight: int) -> dict[str, Any]:
    left, tokens, failures = iter(bodies), 0, 0
    headers = {"Content-Type": "application/json"}
    connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)

    async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as session:

        async def work(url: str) -> None:
            nonlocal tokens, failures
            for body in left:
                try:
                    async with session.post(url + "/generate", data=body, headers=headers) as reply:
                        answer = await reply.json()
                        tokens += len(answer["output_ids"])
                except (aiohttp.ClientError, KeyError, ValueError):
                    failures += 1

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for url in urls:
                for _ in range(in_flight):
                    group.create_task(work(url))
        seconds = time.monotonic() - began
    return {
        "rows": len(bodies),
        "failures": failures,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


if __name__ == "__main__":
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    lines = Path(sys.argv[2]).read_bytes().splitlines()
    print(json.dumps(asyncio.run(run(sys.argv[1].split(","), lines, int(sys.argv[3])))))
