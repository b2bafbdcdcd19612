"""Data parallel training over the processes of one torchrun, or none: sums are added up over ranks, and that is all.

A step's loss is a sum over rows divided by a normaliser that is known beforehand, so adding up gradients and counts
gives the same step as one process would take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed


def rank() -> int:
    """The number of this process, 0 if it is alone."""
    return distributed.get_rank() if _several() else 0


def ranks() -> int:
    """The number of processes that train together."""
    return distributed.get_world_size() if _several() else 1


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def add_up(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks."""
    if ranks() > 1:
        for tensor in tensors:
            distributed.all_reduce(tensor)


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if ranks() > 1:
        distributed.barrier()
