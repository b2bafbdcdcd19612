"""The whole build on real GPUs at toy size, from prompts to acceptance, through Snakemake.

Usage: python tests/gpu/real_build.py OUT_DIR [GPUS]

Needs a GPU, torch, transformers and the package's other dependencies; takes a few minutes. Builds with a random Llama
and a random Qwen3 target in bfloat16, looks that nothing is left to do, and writes OUT_DIR/build.json: what each build
took, what the gate said in every sentinel, and what was measured. Exits with 1 when a build failed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tests.tiny import Project, make_target  # noqa: E402


def build(kind: str, gpus: int, out: Path) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"real-build-{kind}-"))
    make_target(folder / "target", kind)
    project = Project(folder)
    gate = {"lock_dir": str(folder / "leases")}
    project.configure(device="cuda", gate=gate, train={"epochs": 4}, evaluate={"max_new_tokens": 16})
    began = time.monotonic()
    command = [*project.command(gpus=f"gpu={gpus}"), "--cores", "8"]
    with (out / f"{kind}.log").open("wb") as log:
        status = subprocess.run(
            command, cwd=folder, env=project.environment, stdout=log, stderr=log, check=False
        ).returncode
    seconds = time.monotonic() - began
    if status:
        if (folder / "logs").exists():
            shutil.make_archive(str(out / f"{kind}-logs"), "gztar", folder / "logs")
        return {"failed": status, "seconds": seconds}
    sentinels = [json.loads(path.read_text()) for path in sorted((folder / "logs/gpu_free").glob("*.log"))]
    evaluation = json.loads(next((folder / "build/eval").glob("*.json")).read_text())
    return {
        "seconds": seconds,
        "left": project.plan(),
        "sentinels": [verdict["verdict"] for verdict in sentinels],
        "extract_logs": [path.read_text()[-400:] for path in sorted((folder / "logs/extract").glob("*.log"))],
        "identical": evaluation["identical"],
        "prompts": evaluation["prompts"],
        "divergences": evaluation["divergences"],
        "drafter": evaluation["drafter"],
    }


def main(out: Path, gpus: int) -> int:
    out.mkdir(parents=True, exist_ok=True)
    results = {kind: build(kind, gpus, out) for kind in ("llama", "qwen3")}
    (out / "build.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1)[-4000:])
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
