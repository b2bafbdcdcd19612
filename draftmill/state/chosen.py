"""The plan of a configuration file, for a look at a build that has not announced itself or was started with another one.

What decides the names of objects is computed from the target and its digests, which only a machine has that builds; so
the announced plan stands wherever the configuration is the announced one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmill.build_record import public
from draftmill.config import Config
from draftmill.errors import UserError
from draftmill.prompts import index as prompt_index
from draftmill.state.plan import Plan
from draftmill.state.read import Choose
from draftmill.store.base import Store


def plan_for(config: Config, store: Store) -> Choose:
    """What a Reader of the store chooses its plan by: the configuration's own over the store's index, if it can."""
    return lambda announced: _choose(config, store, announced)


def _choose(config: Config, store: Store, announced: Plan | None) -> tuple[Plan | None, list[str]]:
    if announced is not None and _decides(announced.config) == _decides(config):
        return replace(announced, config=config), []
    try:
        index = prompt_index.load(store)
        if index is None:
            return announced, [f"The prompts of this configuration are not in {store.url} yet: start a build."]
        from draftmill.workflow import specs_of

        return Plan("configuration", config, index, specs_of(config, index).fp), []
    except UserError as error:
        shown = "the totals are those of the last build" if announced is not None else "there are no totals"
        return announced, [f"What this configuration wants cannot be told here, so {shown}: {error}"]


def _decides(config: Config) -> dict[str, Any]:
    """The part of a configuration that may decide what is wanted."""
    values = public(config)
    return {name: value for name, value in values.items() if name not in ("store", "s3", "gate", "resources")}
