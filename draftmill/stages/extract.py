"""The extract stage: completions become hidden states of the target.

Rows are packed in the shard's order and run through the target up to the last tap. Before a shard is published, a few
of its rows are computed again alone through the whole target: their taps must agree with the packed ones, and the
logits must fit the tokens that the target chose. Packed rows leaking into each other, cached prefixes, rows of another
request and shifts by one all show there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.config import Config
from draftmill.engines.sampling import Mix
from draftmill.errors import UserError
from draftmill.hidden_states import HiddenRow, RowKey, write_shard
from draftmill.progress import Heartbeat
from draftmill.schemas import COMPLETIONS, Row, iterate_loss_masks, read_rows
from draftmill.target.model import Tapped

# Least mean and least single cosine of a token's tap, packed against alone. Measured in bfloat16 on one H200 across two
# engines: mean 0.9998, single 0.9990; a shift by one layer or token gives 0.80 to 0.97.
_LEAST_MEAN_COSINE = 0.999
_LEAST_COSINE = 0.98
# Log odds against sampled tokens at which they count as not drawn from the logits: honest ones come so low with a chance
# of exp(-20) at most. On SmolLM2's answers of 48 tokens: honest 18 to 34, shifted by one or another row's under -130.
_LEAST_ODDS = -20.0
# Share of greedy tokens that must be the logits' best, up to near ties.
_LEAST_GREEDY = 0.9
# What rounding of bfloat16 leaves between logits that two engines put in different order, as a share of the best one.
_NEAR_TIE = 2**-6


@dataclass(frozen=True, slots=True)
class Canary:
    """How a row computed alone agrees with the packed one, and the row's tokens with its own logits.

    `fit` is the share of tokens that are the best ones (greedy) or the log odds that they were drawn from the target's
    own distribution (sampled), see token_fit; None where the target did not choose the tokens.
    """

    row: int
    mean_cosine: float
    least_cosine: float
    fit: float | None
    agrees: bool


def packs(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Row numbers grouped in order so that a group has at most `limit` tokens; a longer row stands alone."""
    group: list[int] = []
    tokens = 0
    for row, length in enumerate(lengths):
        if group and tokens + length > limit:
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += length
    if group:
        yield group


def canary_rows(lengths: Sequence[int], count: int) -> list[int]:
    """Rows to compute again, ascending: `count` spread evenly over the shard, and its shortest."""
    rows = len(lengths)
    step = max(rows // count, 1)
    spread = {min(rows - 1, step * i + step // 2) for i in range(count)}
    return sorted(spread | {min(range(rows), key=lambda row: lengths[row])})


def token_fit(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> float:
    """How well generated tokens [n] fit float32 logits [n, vocabulary] that should have produced them.

    Greedy: the share that is the best token or nearly ties with it. Sampled: the log of the likelihood ratio of p, the
    distribution at that temperature, to q, the one at twice the temperature. For tokens drawn from p the ratio q/p has
    expectation 1, so the result is below -t with a chance of exp(-t) at most, however few the tokens and however peaked
    p (Markov's inequality; e-values, Vovk and Wang, arXiv 1912.06116). Top-k, top-p and min-p only lower that chance:
    q is flatter than p and so puts less than p on what they keep.
    """
    chosen = tokens[:, None]
    if temperature == 0:
        best, found = logits.max(-1).values, logits.gather(-1, chosen)[:, 0]
        return float((best - found <= _NEAR_TIE * best.abs()).float().mean())
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_q = torch.log_softmax(log_p / 2, dim=-1)
    return float((log_p - log_q).gather(-1, chosen).sum())


def _compare(tapped: Tapped, row: Row, number: int, stored: torch.Tensor, temperature: float) -> Canary:
    ids = [*row["prompt_ids"], *row["output_ids"]]
    states, logits = tapped.states_and_logits(ids)
    cosine = torch.nn.functional.cosine_similarity(states.float().cpu(), stored.float(), dim=-1)
    start = len(row["prompt_ids"])
    fit = None
    if row["origin"] == "generated" and start > 0:
        tokens = torch.tensor(row["output_ids"], device=logits.device)
        fit = token_fit(logits[start - 1 : -1], tokens, temperature)
    least = _LEAST_GREEDY if temperature == 0 else _LEAST_ODDS
    mean, low = float(cosine.mean()), float(cosine.min())
    agrees = (
        mean >= _LEAST_MEAN_COSINE and low >= _LEAST_COSINE and (fit is None or (math.isfinite(fit) and fit >= least))
    )
    return Canary(number, mean, low, fit, agrees)


def extract_shard(
    config: Config,
    tapped: Tapped,
    *,
    completions: Path,
    hidden: Path,
    heartbeat: Callable[[int], Heartbeat],
    provenance: Mapping[str, Any],
) -> list[Canary]:
    """Publish the hidden states of the rows at `completions` and return what the canaries found.

    Raises UserError if a canary disagrees or the shard has no row; nothing is published then.
    """
    rows = read_rows(completions, COMPLETIONS)
    if not rows:
        raise UserError(f"{completions} holds no row, so there are no hidden states to extract; see its rejected file.")
    ids = [[*row["prompt_ids"], *row["output_ids"]] for row in rows]
    with heartbeat(len(rows)) as beat:
        states = _states(tapped, ids, config.hidden.batch_tokens, beat)
        canaries = _canaries(config, tapped, rows, states)
        for canary in canaries:
            if not canary.agrees:
                raise UserError(_disagreement(completions, canary, config))
        masks = iterate_loss_masks(rows)
        found = [_hidden_row(row, mask, state) for row, mask, state in zip(rows, masks, states, strict=True)]
        write_shard(hidden, found, provenance)
    return canaries


def _canaries(config: Config, tapped: Tapped, rows: Sequence[Row], states: Sequence[torch.Tensor]) -> list[Canary]:
    lengths = [len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows]
    mix = Mix(config.generate)
    warmth = [mix.setting((row["prompt_id"], row["sample"]), row["source"]).sampling.temperature for row in rows]
    chosen = canary_rows(lengths, config.hidden.canary_rows)
    return [_compare(tapped, rows[i], i, states[i], warmth[i]) for i in chosen]


def _hidden_row(row: Row, mask: Sequence[bool], state: torch.Tensor) -> HiddenRow:
    prompt, output = row["prompt_ids"], row["output_ids"]
    return HiddenRow(
        RowKey(row["prompt_id"], row["sample"], row["source"]),
        torch.tensor([*prompt, *output], dtype=torch.int32),
        torch.tensor([0] * len(prompt) + [int(bit) for bit in mask], dtype=torch.uint8),
        state,
    )


def _states(tapped: Tapped, ids: Sequence[Sequence[int]], limit: int, heartbeat: Heartbeat) -> list[torch.Tensor]:
    states: list[torch.Tensor] = []
    for group in packs([len(row) for row in ids], limit if tapped.isolates_rows else 1):
        found = tapped.states([ids[row] for row in group])
        for row, state in zip(group, found, strict=True):
            if not bool(torch.isfinite(state).all()):
                raise UserError(
                    f"The target gives hidden states that are not finite for row {row}: its weights are damaged, or they "
                    "overflow in this arithmetic; look at the folder of target.model, or set target.dtype to float32."
                )
            states.append(state.to("cpu", torch.bfloat16))
        heartbeat.advance(len(group), sum(len(ids[row]) for row in group))
    return states


def _disagreement(completions: Path, canary: Canary, config: Config) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in asdict(canary).items() if name not in ("row", "agrees"))
    return (
        f"{completions}: row {canary.row} computed alone disagrees with the packed states or with its own tokens ({facts}), "
        f"so nothing was published; check target.model and target.attention ({config.target.attention}) and whether the "
        "completions came from this target."
    )
