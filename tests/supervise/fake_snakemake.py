"""Stands for Snakemake: each start does the next step of a plan, a JSON list beside it, and writes down what it met."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from draftmill import outcomes

folder = Path(os.environ["FAKE_PLAN"])
with (folder / "starts").open("a") as file:
    file.write(
        json.dumps({"arguments": sys.argv[1:], "run": os.environ.get("DRAFTMILL_RUN"), "pid": os.getpid()}) + "\n"
    )
steps = json.loads((folder / "plan.json").read_text())
step = steps[min(len((folder / "starts").read_text().splitlines()) - 1, len(steps) - 1)]
os.environ["DRAFTMILL_RUN"] = "fake-run"
for kind, sentence in step.get("tell", []):
    outcomes.note(kind, sentence, "generate a")
if "child" in step:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if "lock" in step:
    lock = Path(".snakemake/locks/0.output.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
if "--unlock" in sys.argv:
    Path(".snakemake/locks/0.output.lock").unlink()
    sys.exit(0)
if "wait" in step:
    deaf = step["wait"] == "deaf"

    def heard(*_: object) -> None:
        (folder / "heard").touch()
        if not deaf:
            sys.exit(1)

    signal.signal(signal.SIGINT, heard)
    (folder / "waiting").touch()
    while True:
        time.sleep(0.05)
if "kill" in step:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(step.get("status", 0))
