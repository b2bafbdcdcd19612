"""The drafter of a finished build against the `dflash` package: it loads strictly, and its logits are the same.

Usage: python tests/against_dflash.py STORE TARGET

STORE is the build's folder, TARGET the target's. The inputs are real: rows of held-out hidden states, the target's own
embedding and head. Exits with 1 if a tensor is missing, left over or of another shape, or a logit differs by more than
1e-4 in float32.
"""

import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel

from draftmill.config import parse
from draftmill.drafter.checkpoint import load_drafter
from draftmill.hidden_states import HiddenShard
from draftmill.target.model import load_head

TOLERANCE = 1e-4


@torch.inference_mode()
def compare(store: Path, target: Path) -> tuple[float, float]:
    """The largest difference of two logits, and the largest logit, over the rows of a held-out shard."""
    checkpoint = max(store.glob("drafter/*/window-*"), key=lambda path: path.stat().st_mtime)
    theirs, info = DFlashDraftModel.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise SystemExit(f"{checkpoint} does not load strictly: {wrong}")
    ours = load_drafter(checkpoint, torch.float32, torch.device("cpu"))
    source = {"sources": [{"path": "none"}]}
    config = parse({"device": "cpu", "store": str(store), "target": {"model": str(target)}, "prompts": source})
    embed, head = (matrix.float() for matrix in load_head(config))
    shard = HiddenShard(next(store.glob("hidden/held-out/*.safetensors")))
    size, worst, largest = ours.shape.block_size, 0.0, 0.0
    for number in range(len(shard)):
        row = shard.row(number)
        anchor = len(row.input_ids) // 2
        ids = torch.tensor([int(row.input_ids[anchor])] + [ours.shape.mask_token_id] * (size - 1))
        taps, block = row.hidden[None].float(), embed[ids][None, None]
        reference = theirs.eval()(
            position_ids=torch.arange(anchor + size)[None],
            noise_embedding=block[0],
            target_hidden=taps[:, :anchor].flatten(-2),
        )
        expected = reference @ head.T
        found = ours(taps, block, torch.tensor([[anchor]]))[:, 0] @ head.T
        worst = max(worst, float((found - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst, largest


def main() -> int:
    worst, largest = compare(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"dflash: loads strictly; logits up to {largest:.1f} differ by at most {worst:.2e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
