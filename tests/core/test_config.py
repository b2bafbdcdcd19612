"""The configuration: exact sentences for each kind of mistake, shipped files that parse, and a word about every key."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from draftmill.config import Config, load, parse
from draftmill.errors import UserError
from tests.tiny import ROOT, config_values

WRONG = "The configuration is wrong: "


def sentence(**changes):
    with pytest.raises(UserError) as caught:
        parse(config_values(**changes))
    text = str(caught.value)
    assert text.startswith(WRONG)
    return text.removeprefix(WRONG)


def test_a_sound_configuration_parses_and_defaults_fill_it():
    config = parse(config_values())
    assert (config.generate.temperature, config.train.loss, config.dtype) == (1.0, "cross_entropy", "float32")
    assert parse(config_values(device="cuda")).dtype == "bfloat16"
    assert parse(config_values(device="cuda", target={"dtype": "float32"})).dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"generate": {"temprature": 1}}, "generate.temprature is not a known key (config/README.md lists them)"),
        ({"genrate": {"seed": 1}}, "genrate is not a known key (config/README.md lists them)"),
        ({"gate": {"waits": 1}}, "gate.waits is not a known key (config/README.md lists them)"),
        ({"prompts": {"sources": [{"name": "a"}]}}, "prompts.sources.0.path is missing"),
        (
            {"generate": {"temperature": "warm"}},
            "generate.temperature: Input should be a valid number, unable to parse string as a number (it is 'warm')",
        ),
        (
            {"generate": {"temperature": -0.1}},
            "generate.temperature: Input should be greater than or equal to 0 (it is -0.1)",
        ),
        (
            {"generate": {"temperature": float("inf")}},
            "generate.temperature: Input should be a finite number (it is inf)",
        ),
        (
            {"train": {"learning_rate": float("nan")}},
            "train.learning_rate: Input should be a finite number (it is nan)",
        ),
        ({"prompts": {"held_out": 0.5}}, "prompts.held_out: Input should be less than 0.5 (it is 0.5)"),
        (
            {"prompts": {"sources": []}},
            "prompts.sources: List should have at least 1 item after validation, not 0 (it is [])",
        ),
        ({"train": {"loss": "mse"}}, "train.loss: Input should be 'cross_entropy' or 'dpace' (it is 'mse')"),
        ({"device": "gpu"}, "device: Input should be 'cpu' or 'cuda' (it is 'gpu')"),
        (
            {"drafter": {"layers": 1, "sliding_layers": 2}},
            "drafter: sliding_layers is 2 but there are only 1 layers "
            "(it is {'layers': 1, 'block_size': 4, 'sliding_layers': 2})",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_each_mistake_is_named_with_its_key(changes, text):
    assert sentence(**changes) == text


def test_a_missing_section_and_two_mistakes_at_once_are_all_named():
    with pytest.raises(UserError) as caught:
        parse({"device": "cpu", "store": "b", "prompts": {"sources": [{"path": "x"}]}, "seed": 1})
    assert str(caught.value) == WRONG + "target is missing; seed is not a known key (config/README.md lists them)"


def test_a_configuration_file_that_is_none(tmp_path):
    path = tmp_path / "config.yaml"
    assert refused(path) == f"There is no configuration file {path}: give one with --configfile."
    assert refused(tmp_path) == f"{tmp_path} cannot be read as a configuration file (Is a directory)."
    path.write_text("")
    assert refused(path) == f"{path} holds no mapping of keys: see config/README.md."
    path.write_text("- a\n")
    assert refused(path) == f"{path} holds no mapping of keys: see config/README.md."
    path.write_bytes(b"a: \xff\n")
    assert refused(path) == f"{path} is not UTF-8 text, so it is no configuration file."
    path.write_text("a: [1\nb: 2\n")
    text = refused(path)
    assert text.startswith(f"{path} is not valid YAML: ")
    assert "\n" not in text


def refused(path):
    with pytest.raises(UserError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_parses(path: Path):
    load(path)


def sections(model, name=""):
    for key, field in model.model_fields.items():
        yield f"{name}{key}", field
        kind = field.annotation
        for inner in (kind, *getattr(kind, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner, f"{name}{key}.")


@pytest.mark.parametrize(
    ("name", "field"), list(sections(Config)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_says_what_it_means(name, field):
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        assert kind.__doc__, name
    else:
        assert field.description, name
        assert field.description.endswith((".", ")")), name
