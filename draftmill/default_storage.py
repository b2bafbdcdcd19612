"""Snakemake's default storage, set from the configuration, so that `store` is the only place that names the bucket.

On the command line the provider would be named a second time, and the two could differ. Snakemake has no public way to
set it from a Snakefile, so one attribute of its registry is set and the outcome is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from draftmill import outcomes
from draftmill.config import Config
from draftmill.errors import UserError
from draftmill.store.base import ObjectInfo
from draftmill.store.patience import Patience, brief, trouble
from draftmill.store.s3 import split
from draftmill.store.s3_wire import Stored
from draftmill.store.workplace import PROVIDER

T = TypeVar("T")


class TellingPatience(Patience):
    """Tells `draftmill run` why a transfer by Snakemake itself failed: Snakemake ends then, with status 1 as for all."""

    def __call__(self, request: Callable[[], T]) -> T:
        """The request's result, as from Patience."""
        try:
            return super().__call__(request)
        except Exception as error:
            away = trouble(error)
            kind, sentence = (away, f"{self.store}: {brief(error)}.") if away else outcomes.verdict(error)
            if sentence is not None:
                outcomes.note(kind, sentence)
            raise


@dataclass(frozen=True)
class Seen:
    """What a plan knows of the store.

    `listing` is what it has listed, so that the provider need not list again; a job's is empty, and enough for it.
    `parts` are listed outputs that lack others of their job. Somebody may be at it: their job removes them, and not
    Snakemake, if they are to be made again. `temporary` are outputs that Snakemake removes.
    """

    listing: Mapping[str, ObjectInfo]
    parts: Sequence[str] = ()
    temporary: Sequence[str] = ()


def attach(workflow: Any, config: Config, seen: Seen) -> None:
    """Let every path of the rules that is not `local()` mean an object of the store."""
    # One request at a time is logged in full otherwise.
    logging.getLogger("botocore").setLevel(logging.WARNING)
    settings, registry = workflow.storage_settings, workflow.storage_registry
    settings.default_storage_provider, settings.default_storage_prefix = PROVIDER, config.store
    provider = registry.register_storage(PROVIDER, is_default=True, **_options(config))
    registry._default_storage_provider = provider
    if registry.default_storage_provider is not provider:
        raise UserError(
            "This version of Snakemake takes no default storage from the Snakefile: install the version that envs/cpu.txt "
            "names."
        )
    provider.patience = TellingPatience(**{one.name: getattr(provider.patience, one.name) for one in fields(Patience)})
    provider.alone = lambda: workflow.is_main_process and workflow.local_exec
    _hand_over(provider, config.store, seen)


def _options(config: Config) -> dict[str, Any]:
    s3 = config.s3
    return {
        "endpoint_url": s3.endpoint_url,
        "region": s3.region,
        "path_style": s3.path_style,
        "checksum": s3.checksum,
        "multipart_threshold": s3.multipart_threshold,
        "retries": s3.retries,
        "wait_s": s3.wait_s,
        # Jobs publish their outputs themselves.
        "look_first": True,
        "inventory_prefix": config.store,
    }


def _hand_over(provider: Any, url: str, seen: Seen) -> None:
    bucket, prefix = split(url)
    entries = ((prefix + info.key, Stored(info.size, info.modified)) for info in seen.listing.values())
    provider.take(bucket, prefix, entries)
    provider.own -= {(bucket, prefix + key) for key in seen.parts}
    provider.temporary = frozenset((bucket, prefix + key) for key in seen.temporary)
