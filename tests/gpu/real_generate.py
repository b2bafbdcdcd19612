"""Generation on real SGLang servers: figures, kills, agreement with transformers, and recorded exchanges.

Usage: python tests/gpu/real_generate.py OUT --model DIR --prompts FILE.json [--server-site DIR] [--steps a,b] [--help]

Steps: measure (start a server, `draftmill bench generate`), exchanges (record real replies), greedy (64 prompts against
transformers), bench (benchmarks/generate: pilot, eviction, build against the bare client), kills (SIGKILL of job, server and
Snakemake, three each), idle (Snakemake killed for good: the server ends by itself), big (a random Qwen3 of 8B parameters).
Each step is limited in time and runs whatever became of the one before; OUT/generate.json is rewritten after every one.
No server is left behind: at the end, also after an error or a limit, all of them are ended and the GPU is proven free.
Exits with 1 when a step failed.

Where a command may only run for minutes, give the same one again and again while it exits with 3: with `--resume` and a
`--work` that stays, each call makes what is left, and begins nothing that it has no time for. Kills for which the build was
over too soon are no final failure: the next call makes all of them anew, with more --kill-prompts if they are given.

    python tests/gpu/real_generate.py OUT --work WORK --resume --minutes 9.2 --steps bench,kills,idle --model DIR --prompts F
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from tests.gpu.generate_kills import idle, kills  # noqa: E402
from tests.gpu.generate_steps import bench, big, exchanges, greedy, measure  # noqa: E402
from tests.gpu.visit import StepFailed, Unfinished, Visit, add_arguments  # noqa: E402

__all__ = ["add_arguments", "visit"]

UNFINISHED = 3
STEPS: dict[str, Callable[[Visit], None]] = {
    "measure": measure,
    "exchanges": exchanges,
    "greedy": greedy,
    "bench": bench,
    "kills": kills,
    "idle": idle,
    "big": big,
}


def _too_long(*_: object) -> None:
    raise TimeoutError("a step took longer than its limit")


def _ended(*_: object) -> None:
    raise KeyboardInterrupt


def visit(args: argparse.Namespace) -> int:
    """All chosen steps, or what an earlier call has left of them; the exit status."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, _ended)
    found, unfinished, again = Visit(args), "", list[str]()
    try:
        for name in args.steps.split(","):
            if name in found.over:
                continue
            try:
                STEPS[name](found)
                found.over[name] = True
            except Unfinished as step:
                unfinished = str(step)
                break
            except StepFailed as step:
                if args.resume and not step.final:
                    again.append(name)
                else:
                    found.over[name] = False
            except Exception:
                found.steps.append({"step": name, "ok": False, "seconds": 0, "detail": traceback.format_exc()[-6000:]})
                print(found.steps[-1]["detail"], flush=True)
                found.over[name] = False
    finally:
        found.figures["at_the_end"] = found.clear()
        found.save()
        print(json.dumps(found.figures["at_the_end"]), flush=True)
    failed = [*again, *(name for name, well in found.over.items() if not well)]
    if found.figures["at_the_end"]["verdict"] != "free":
        failed.append("at_the_end")
    said = "failed: " + ", ".join(failed) if failed else "all steps passed"
    if unfinished and "at_the_end" not in failed:
        print(f"{said} so far; time is over before {unfinished}: give the same command again", flush=True)
        return UNFINISHED
    print(said, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    sys.exit(visit(parser.parse_args()))
