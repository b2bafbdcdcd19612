"""Greedy ids of a server against transformers: python greedy_agreement.py MODEL ROWS.json TOKENS

ROWS.json: objects with `prompt` and `output` ids and the `stop` ids. Every row is asked alone (batch 1 prompts' kernels) in
one left-padded batch of transformers in bfloat16; where a row parts from it, the gap between the two tokens in
transformers' logits says whether it was a near tie. Prints one JSON object.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def padded(rows: list[dict[str, Any]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row["prompt"]) for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, width - len(row["prompt"]) :] = torch.tensor(row["prompt"])
        mask[number, width - len(row["prompt"]) :] = 1
    return ids.to(device), mask.to(device)


def cut(ids: list[int], stop: set[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in stop:
            return ids[: place + 1]
    return ids


@torch.inference_mode()
def main(model_path: str, rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval()
    ids, mask = padded(rows, device)
    stop = sorted(set(rows[0]["stop"]))
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=stop, pad_token_id=stop[0],
        temperature=None, top_p=None, top_k=None,
    )[:, ids.shape[1] :].tolist()  # fmt: skip
    firsts, gaps, same = [], [], 0
    for row, ours in zip(rows, made, strict=True):
        theirs, ours = row["output"], cut(ours, set(stop))
        part = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if part is None and len(ours) == len(theirs):
            same += 1
            continue
        part = min(len(ours), len(theirs)) if part is None else part
        firsts.append(part)
        if part < min(len(ours), len(theirs)):
            context = torch.tensor([[*row["prompt"], *theirs[:part]]], device=device)
            logits = model(input_ids=context).logits[0, -1].float()
            gaps.append(round((logits[ours[part]] - logits[theirs[part]]).abs().item(), 4))
    firsts.sort()
    return {
        "rows": len(rows),
        "identical": same,
        "rate": round(same / len(rows), 4),
        "first_divergence": firsts,
        "earliest": firsts[0] if firsts else None,
        "median": firsts[len(firsts) // 2] if firsts else None,
        "within_first_4": sum(first < 4 for first in firsts),
        "logit_gaps": sorted(gaps),
        "tokens": tokens,
        "dtype": str(dtype),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]))))
