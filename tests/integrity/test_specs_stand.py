"""Specs of released versions, recorded: today's code must lead each of them to today's spec of the same settings.

A new key that changes nothing by default must be left out of the spec while it has its default, or be added by a
declared step; otherwise every object that people have would be thrown away.
"""

import json
from pathlib import Path

import pytest

from draftmill.adoption import REMADE, upgrade
from tests.core.builds import configuration, specs_of

RELEASED = sorted(Path(__file__).parent.glob("specs-*.json"))


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_a_released_spec_leads_to_todays(path):
    old = json.loads(path.read_text())
    now = json.loads(json.dumps(specs_of(configuration()).spec))
    for stage in sorted({*old} - REMADE):
        assert upgrade(stage, old[stage]) == now[stage], (
            f"declare in draftmill/adoption.py what {stage} of before becomes"
        )


def test_there_is_a_released_spec():
    assert RELEASED
