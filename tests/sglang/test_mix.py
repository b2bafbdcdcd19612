"""Several settings mixed by weight: chosen by the row alone, in their proportions, by source, and written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.config import GenerateConfig, parse
from draftmill.engines.sampling import Mix
from draftmill.errors import UserError
from tests.tiny import config_values

SETTINGS = st.lists(
    st.fixed_dictionaries(
        {
            "weight": st.floats(0.01, 100, allow_nan=False),
            "sources": st.none() | st.lists(st.sampled_from("abc"), min_size=1, unique=True),
            "temperature": st.none() | st.floats(0, 2),
            "max_new_tokens": st.none() | st.integers(1, 5000),
        }
    ),
    max_size=5,
).map(lambda found: [{"name": f"n{number}", **setting} for number, setting in enumerate(found)])


@given(SETTINGS, st.integers(0, 2**40), st.integers(0, 5), st.sampled_from("abcd"), st.integers(0, 9))
def test_a_row_has_one_setting_that_is_for_its_source_and_stays(mix, number, sample, source, seed):
    config = GenerateConfig(mix=mix, seed=seed, max_new_tokens=7)
    found = Mix(config).setting((f"p{number}", sample), source)
    assert found == Mix(config).setting((f"p{number}", sample), source)
    fitting = [s for s in config.mix if s.sources is None or source in s.sources]
    if not fitting:
        assert found == Mix(config).own
        return
    (chosen,) = [s for s in fitting if s.name == found.name]
    assert found.sampling.temperature == (config.temperature if chosen.temperature is None else chosen.temperature)
    assert found.sampling.max_new_tokens == (chosen.max_new_tokens or 7)
    assert found.sampling.top_k == config.top_k
    assert found.sampling.max_new_tokens <= config.longest_answer


def test_settings_come_in_the_proportions_of_their_weights_and_samples_differ():
    mix = [{"name": "thinking", "weight": 3}, {"name": "plain"}, {"name": "code", "weight": 96, "sources": ["code"]}]
    chooser = Mix(GenerateConfig(mix=mix))
    found = [chooser.setting((f"p{n}", n % 2), "chat").name for n in range(4000)]
    # Four standard deviations of a binomial of 4000 at 3/4 are 110.
    assert abs(found.count("thinking") - 3000) < 110
    assert set(found) == {"thinking", "plain"}
    code = [chooser.setting((f"p{n}", 0), "code").name for n in range(1000)]
    assert 930 < code.count("code") < 985
    both = [
        (chooser.setting((f"p{n}", 0), "chat").name, chooser.setting((f"p{n}", 1), "chat").name) for n in range(400)
    ]
    assert len(set(both)) == 4


def test_adding_a_setting_at_the_end_moves_as_few_rows_as_its_weight():
    before = Mix(GenerateConfig(mix=[{"name": "a"}]))
    after = Mix(GenerateConfig(mix=[{"name": "a"}, {"name": "b"}]))
    moved = sum(before.setting((f"p{n}", 0), "x").name != after.setting((f"p{n}", 0), "x").name for n in range(1000))
    assert 430 < moved < 570


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "a name of its own"),
        ([{"name": "a", "weight": 0}], "greater than 0"),
        ([{"name": ""}], "at least 1 character"),
        ([{"name": "a", "temprature": 1}], "is not a known key"),
    ],
)
def test_a_wrong_mix_is_refused_in_a_sentence(mix, words):
    with pytest.raises(UserError, match=words):
        parse(config_values(generate={"mix": mix}))


@pytest.mark.parametrize("urls", [["localhost:30000"], ["http://a:1", "http://a:1/"]])
def test_addresses_must_be_addresses(urls):
    with pytest.raises(UserError, match="different addresses that begin with http"):
        parse(config_values(generate={"engine": "sglang", "sglang": {"urls": urls}}))


def test_the_largest_limit_leaves_room_for_every_setting():
    mix = [{"name": "thinking", "max_new_tokens": 900}, {"name": "plain"}]
    assert GenerateConfig(max_new_tokens=100, mix=mix).longest_answer == 900
    assert GenerateConfig(max_new_tokens=100).longest_answer == 100
