"""Puts together what training and evaluation need from a configuration: shape, mask token, target parts, progress.

The stages themselves take tensors and modules, so that they can be driven without a configuration or a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftmill.config import Config
from draftmill.drafter.checkpoint import load_drafter
from draftmill.drafter.spec import DrafterShape, choose_mask_token, resolve_shape
from draftmill.progress import Heartbeat
from draftmill.schemas import read_completions
from draftmill.stages.evaluate import HeldOutPrompt, evaluate_drafter
from draftmill.stages.train import Progress, train_window
from draftmill.target.files import context_length, read_config
from draftmill.target.model import device_of, load_head, load_model
from draftmill.target.tokenizer import generation_config, load_tokenizer, special_ids, stop_ids, template_ids

Beats = Callable[[int, str], Heartbeat]


def drafter_shape(config: Config, embedding_rows: int) -> DrafterShape:
    """The drafter's shape with its mask token chosen. Raises UserError if the settings do not fit the target."""
    shape = resolve_shape(config.drafter, config.hidden, read_config(config.target))
    if shape.mask_token_id is not None:
        return shape
    tokenizer = load_tokenizer(config.target)
    special = {str(tokenizer.convert_ids_to_tokens(i)): i for i in special_ids(tokenizer)}
    ends = stop_ids(tokenizer, generation_config(config.target))
    used = {*template_ids(tokenizer, config.target.chat_template_args), *ends}
    return shape.with_mask_token(choose_mask_token(special, used, len(tokenizer), embedding_rows))


def train_drafter(
    config: Config,
    *,
    hidden: Sequence[Path],
    held_out: Sequence[Path],
    previous: Path | None,
    output: Path,
    journal: Path,
    saved: Callable[[Path], None] = lambda path: None,
    span: tuple[float, float],
    provenance: Mapping[str, Any],
    heartbeat: Beats,
    attest: Callable[[], object],
) -> None:
    """Train one window (stages/train.py) as configured; `attest` is called once the GPU's memory is in use."""
    device = device_of(config)
    stored, head = load_head(config)
    embed = stored.to(device)
    head = embed if head is stored else head.to(device)
    attest()
    with _steps(heartbeat) as progress:
        train_window(
            hidden=hidden,
            held_out=held_out,
            previous=previous,
            output=output,
            journal=journal,
            saved=saved,
            shape=drafter_shape(config, int(embed.shape[0])),
            target=read_config(config.target),
            embed=embed,
            head=head,
            config=config.train,
            span=span,
            device=device,
            provenance=provenance,
            progress=progress,
        )


@contextmanager
def _steps(heartbeat: Beats) -> Iterator[Progress]:
    """Progress of a training whose number of steps is known only at its first."""
    beat: Heartbeat | None = None
    with ExitStack() as stack:

        def progress(done: int, total: int, facts: Mapping[str, float]) -> None:
            nonlocal beat
            if beat is None:
                beat = stack.enter_context(heartbeat(total, "steps"))
                beat.resume(done - 1)
            beat.advance(done - beat.done, 0, dict(facts))

        yield progress


def evaluate_checkpoint(
    config: Config,
    *,
    drafter: Path,
    held_out: Sequence[Path],
    output: Path,
    provenance: Mapping[str, Any],
    heartbeat: Beats,
    attest: Callable[[], object],
) -> None:
    """Measure the drafter in the folder `drafter` on the prompts of the completions files `held_out`."""
    model = load_model(config)
    attest()
    loaded = load_drafter(drafter, model.dtype, model.device)
    prompts = held_out_prompts(held_out)
    with heartbeat(min(len(prompts), config.evaluate.max_prompts), "prompts") as beat:
        evaluate_drafter(
            prompts=prompts,
            drafter=loaded,
            target=model,
            stop=stop_ids(load_tokenizer(config.target), model.generation_config),
            config=config.evaluate,
            context_length=context_length(config.target),
            exact=config.dtype == "float32",
            output=output,
            provenance=provenance,
            progress=lambda done, total, tokens: beat.advance(1, tokens),
        )


def held_out_prompts(completions: Sequence[Path]) -> list[HeldOutPrompt]:
    """One prompt for each held-out prompt id, ordered by id so that a smaller limit takes a fixed part of a larger."""
    rows = [row for path in completions for row in read_completions(path).to_pylist() if row["sample"] == 0]
    rows.sort(key=lambda row: row["prompt_id"])
    return [HeldOutPrompt(row["prompt_id"], row["source"], tuple(row["prompt_ids"])) for row in rows]
