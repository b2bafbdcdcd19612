"""Which of several settings a row is asked under.

A drafter must see what it will serve, so a build may mix settings: thinking on and off, several temperatures, other
limits for some sources. The setting of a row is a function of its prompt, sample and source and of nothing else, so
that a resumed or repeated job asks the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftmill.canonical import seed_of
from draftmill.config import GenerateConfig, MixSetting
from draftmill.engines.base import Key, Sampling

_SEEDS = float(2**63)
_NAMES = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to ask: its name ("" for that of the section itself), sampling, and further chat template arguments."""

    name: str
    sampling: Sampling
    template_args: Mapping[str, Any]


class Mix:
    """The settings of a configuration."""

    def __init__(self, config: GenerateConfig) -> None:
        self._seed, self._mix = config.seed, config.mix
        self.own = Setting("", Sampling(**{name: getattr(config, name) for name in _NAMES}), {})
        self._settings = {setting.name: _over(config, setting) for setting in config.mix}

    def setting(self, key: Key, source: str) -> Setting:
        """The setting of a row; that of the section itself where no setting of the mix is for its source."""
        fitting = [s for s in self._mix if s.sources is None or source in s.sources]
        if not fitting:
            return self.own
        point = seed_of(f"mix:{self._seed}:{key[0]}:{key[1]}") / _SEEDS * sum(s.weight for s in fitting)
        for chosen in fitting:
            point -= chosen.weight
            if point < 0:
                return self._settings[chosen.name]
        return self._settings[fitting[-1].name]


def _over(config: GenerateConfig, mixed: MixSetting) -> Setting:
    given = {name: getattr(mixed, name) for name in _NAMES}
    values = {name: getattr(config, name) if value is None else value for name, value in given.items()}
    return Setting(mixed.name, Sampling(**values), dict(mixed.chat_template_args))
