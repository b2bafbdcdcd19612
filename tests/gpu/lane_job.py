"""One job of a lane: takes its lease, uses the GPU, writes down which one it had and when.

Usage: lane_job.py POLICY_JSON GPUS OUTPUT cuda|pretend SECONDS
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftmill.gpu import gate
from draftmill.gpu.policy import GatePolicy

HOLDER = Path(__file__).with_name("cuda_holder.py")


def use(held: gate.Lease, seconds: float) -> dict[str, Any]:
    """A small CUDA program on the leased GPUs; returns the UUIDs that CUDA saw, and the attestation."""
    with subprocess.Popen(
        [sys.executable, str(HOLDER), "2048", str(seconds)],
        env={**os.environ, **held.environment()},
        pass_fds=held.pass_fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        held.started(child.pid)
        assert child.stdout is not None
        seen = json.loads(child.stdout.readline())
        attested = held.attest()
        child.wait(timeout=seconds + 60)
    return {"cuda_uuids": seen, "attested": attested}


def main() -> None:
    policy, gpus, output, mode, seconds = sys.argv[1:]
    job = {"run_id": "lanes", "stage": "lane", "shard": Path(output).stem}
    with gate.lease(GatePolicy.model_validate_json(policy), "cuda", gpus=int(gpus), **job) as held:
        began = time.time()
        extra: dict[str, Any] = {}
        if mode == "cuda":
            extra = use(held, float(seconds))
        else:
            time.sleep(float(seconds))
        ended = time.time()
        document = {"uuids": held.uuids, "began": began, "ended": ended, "verdict": json.loads(held.verdict.text())}
    Path(output).write_text(json.dumps({**document, **extra}) + "\n")


if __name__ == "__main__":
    main()
