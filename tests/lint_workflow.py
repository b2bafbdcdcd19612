"""Run `snakemake --lint` on the real Snakefile and pass what does not apply here, each by name and with its reason."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.tiny import Project

# Snakemake's advice -> why it does not apply.
PASSED = {
    "Specify a conda environment or container for each rule.": (
        "draftmill installs into one pinned environment (envs/), of which every rule is part"
    ),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        result = Project(Path(folder)).run("--lint", "text")
    output = result.stdout + result.stderr
    advice = [line.strip(" *") for line in output.splitlines() if line.startswith("    * ")]
    left = [line for line in advice if not any(line.startswith(known) for known in PASSED)]
    if left or not advice:
        print(output)
        return 1
    print(f"snakemake --lint: nothing but {len(advice)} remarks passed by name")
    return 0


if __name__ == "__main__":
    sys.exit(main())
