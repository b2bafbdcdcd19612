"""A stage whose output changes must raise its version, or finished work of another meaning would be taken for its own."""

import copy
import json

import pytest

from draftmill.specs import SPEC_VERSIONS
from tests.golden import compare, update
from tests.golden.compare import difference, read
from tests.golden.outputs import STAGES, output, version

RAISE = (
    "raise its version in draftmill/specs.py (prompts: INDEX_VERSION in draftmill/prompts/index.py) if the meaning of "
    "its output changed, then run `python tests/golden/update.py`"
)


def test_every_stage_has_a_golden_output():
    """Except the report: a page for people, whose numbers are other stages'."""
    assert set(STAGES) == {*SPEC_VERSIONS, "prompts"} - {"report"}
    assert set(read()) == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_the_output_is_that_of_its_version(stage):
    golden = read()[stage]
    assert golden["version"] == version(stage), f"the golden output of {stage} is of another version: {RAISE}"
    changed = difference(golden["output"], output(stage))
    assert changed is None, f"the output of {stage} changed at {changed}: {RAISE}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_anywhere_is_seen(stage):
    golden = read()[stage]["output"]
    for place in leaves(golden):
        changed = copy.deepcopy(golden)
        inner = changed
        for step in place[:-1]:
            inner = inner[step]
        value = inner[place[-1]]
        inner[place[-1]] = value + 1 + abs(value) if isinstance(value, float) else [value]
        assert difference(golden, changed) is not None, place


def leaves(value, place=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in items for leaf in leaves(item, (*place, key))]
    return found or ([place] if place else [])


def test_rounding_is_no_change():
    assert difference({"a": [1.0, 2]}, {"a": [1.02, 2]}) is None
    assert difference({"a": [1.0, 2]}, {"a": [1.05, 2]}) == ".a[0]: 1.0 became 1.05"
    assert difference({"a": 1}, {"a": 1.0}) == ".a: 1 became 1.0"
    assert difference([1], [1, 2]) == ": [1] became [1, 2]"


def test_an_update_is_refused_until_the_version_is_raised(tmp_path, monkeypatch, capsys):
    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps(read()))
    before = golden.read_text()
    for module in (compare, update):
        monkeypatch.setattr(module, "GOLDEN", golden)
    monkeypatch.setattr(update, "output", lambda stage: ["new"] if stage == "train" else read()[stage]["output"])
    assert update.main() == 1
    assert capsys.readouterr().out.startswith("Raise the version of train in draftmill/specs.py")
    assert golden.read_text() == before
    monkeypatch.setattr(update, "version", lambda stage: version(stage) + (stage == "train"))
    assert update.main() == 0
    found = json.loads(golden.read_text())
    assert found.pop("train") == {"version": version("train") + 1, "output": ["new"]}
    assert found == {stage: read()[stage] for stage in found}
