"""Write the golden outputs anew: `python tests/golden/update.py`.

A stage whose output changed must have a new version first; finished work in people's stores carries the old one.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden.compare import GOLDEN, difference, read
from tests.golden.outputs import STAGES, output, version


def main() -> int:
    old, new, refused = read(), {}, []
    for stage in STAGES:
        found = output(stage)
        known = old.get(stage)
        if known is not None and difference(known["output"], found) is None:
            found = known["output"]
        elif known is not None and known["version"] == version(stage):
            refused.append(stage)
        new[stage] = {"version": version(stage), "output": found}
    if refused:
        print(f"Raise the version of {', '.join(refused)} in draftmill/specs.py (prompts: INDEX_VERSION) first.")
        return 1
    GOLDEN.write_text(json.dumps(new, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
