"""How the gate refuses: one sentence for people, the whole verdict for the record."""

from draftmill.errors import UserError
from draftmill.gpu.reasons import KINDS
from draftmill.gpu.record import Reason, Verdict

_NAMED = 3


class GateRefused(UserError):
    """The GPUs could not be proven free; `verdict` is the record."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(sentence(verdict))
        self.verdict = verdict
        # Where a reason stays until a person acts, trying again is no use.
        self.kind = "busy" if all(KINDS[found.code].passing for found in verdict.reasons) else "mistake"


class GpuBusy(GateRefused):
    """The GPUs are proven to be in use, or not fit for use."""


def refusal(verdict: Verdict) -> GateRefused:
    """The exception that a verdict of busy or unknown becomes."""
    return GpuBusy(verdict) if verdict.verdict == "busy" else GateRefused(verdict)


def sentence(verdict: Verdict) -> str:
    """What was asked, what stands against it, and what to do, in one sentence."""
    named = [f"{r.gpu + ': ' if r.gpu else ''}{r.detail}{_limit(r)}" for r in verdict.reasons[:_NAMED]]
    more = len(verdict.reasons) - len(named)
    why = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
    waited = f" after {verdict.waited_s:.0f} s" if verdict.waited_s >= 1 else ""
    remedies = list(dict.fromkeys(KINDS[r.code].remedy for r in verdict.reasons[:_NAMED]))
    state = "busy" if verdict.verdict == "busy" else "not proven free"
    what = "1 GPU is" if verdict.wanted == 1 else f"{verdict.wanted} GPUs are"
    return f"GPU gate: {what} wanted and {state}{waited} ({why}); to go on: {', or '.join(remedies) or 'try again'}."


def _limit(found: Reason) -> str:
    return "" if found.limit is None else f" (limit {found.limit:g})"
