"""The page: what it says, that hostile text stays text, that nothing is fetched, that inputs alone decide it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable

import pytest

from draftmill.errors import UserError

from .conftest import VERSIONS, Page, RunFiles

Make = Callable[..., RunFiles]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}\u202e\x1b[31m"


def policy(page: Page) -> str:
    return next(
        str(attributes["content"])
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )


def test_every_number_of_the_inputs_is_said(make_run: Make) -> None:
    run = make_run()
    page = Page(run.build())
    own, lookup = run.evaluation["drafter"], run.evaluation["prompt_lookup"]
    expected = ["1,951", "198 to train on", "18 held out", "4 exact duplicates", "1,729 beyond", "2 bad: broken json"]
    expected += ["prompts.jsonl line 9", "3 taps of width 576", "3.5 kB", "195 rows"]
    expected += [f"{run.evaluation['prompts']} held-out prompts", "16 of 16"]
    for decoder in (own, lookup):
        for value in (decoder["acceptance_length"], *(g["acceptance_length"] for g in decoder["by_source"].values())):
            expected += [f"{value['mean']:.2f}", f"{value['low']:.2f} to {value['high']:.2f}"]
        for value in (decoder["saved_share"], *(row["share"] for row in decoder["by_position"])):
            expected += [f"{value['mean']:.1%}", f"{value['low']:.1%} to {value['high']:.1%}"]
        expected += [f"{decoder['saved_forwards']} of {decoder['tokens']}"]
        expected += [str(row["blocks"]) for row in decoder["by_position"]]
    for path in run.train:
        for epoch in json.loads(path.read_text())["epochs"]:
            expected += [f"{epoch['train']['loss']:.3f}", f"{epoch['held_out']['loss']:.3f}"]
            expected += [f"{epoch['held_out']['accuracy']:.1%}", f"{epoch['held_out']['accepted']:.3f}"]
    expected += [*VERSIONS.values(), "sampling.temperature", "0.6", "2 · 9 · 16"]
    assert [text for text in expected if text not in page.text] == []


def test_the_pages_that_show_rows_and_shards_are_named(make_run: Make) -> None:
    text = Page(make_run().build()).text
    assert "draftmill dashboard" in text
    assert "draftmill report --out build.html" in text


def test_data_is_summed_over_shards_and_the_spike_is_named(make_run: Make) -> None:
    run = make_run(shards=3)
    page = Page(run.build())
    answers = 3 * 2 * (15 + 11)
    assert f"{answers} answers hold" in page.text
    spike = re.search(r"is 12, which (\d+) answers \(([\d.]+)%\) have", page.text)
    assert spike
    assert int(spike[1]) >= 3 * 2 * 6
    assert float(spike[2]) == pytest.approx(100 * int(spike[1]) / answers, abs=0.05)
    figure = page.data("figures")["plot-loss-tokens"]
    assert sum(sum(bar["y"]) for bar in figure["data"]) == answers
    assert figure["layout"]["annotations"][0]["text"].startswith(f"exactly 12: {spike[1]} answers")


def test_hostile_text_stays_text(make_run: Make) -> None:
    run = make_run(sources=(HOSTILE, "plain"))
    run.counts["bad"] = {"broken_json": {"count": 1, "first": [HOSTILE]}}
    run.specs["generate"]["sampling"] = {HOSTILE: HOSTILE, "list": [HOSTILE, "b"]}
    run.evaluation["divergences"] = [{"decoder": "drafter", "prompt_id": HOSTILE, "position": 3, "gap": 0.0004}]
    page = Page(run.build())
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []
    assert len(page.scripts) == 4
    shown = HOSTILE.replace("\u202e", "⟦U+202E⟧").replace("\x1b", "⟦U+001B⟧")
    assert (
        page.text.count(shown) == 7
    )  # data, acceptance, the bad record, two settings and the key of one, the divergence


def test_plot_labels_hold_no_markup(make_run: Make) -> None:
    # Plotly draws <a href> and <b> of a label as link and bold text.
    name = '<a href="//x">y</a> & <b>'
    figures = Page(make_run(sources=(name, "plain")).build()).data("figures")
    labels = figures["plot-sources"]["layout"]["yaxis"]["ticktext"]
    labels += [row[0] for trace in figures["plot-sources"]["data"] for row in trace["customdata"]]
    assert any(label.startswith("&lt;a href=&quot;//x&quot;&gt;y") for label in labels)
    assert [label for label in labels if "<" in label] == []


def test_nothing_is_fetched_and_only_the_pages_own_scripts_may_run(make_run: Make) -> None:
    page = Page(make_run().build())
    links = [attributes[name] for _, attributes in page.tags for name in ("src", "href") if attributes.get(name)]
    assert links
    assert [link for link in links if not str(link).startswith("../audits/")] == []
    assert [tag for tag, _ in page.tags if tag in {"link", "iframe", "object", "base", "form"}] == []
    allowed = re.search(r"script-src ([^;]*)", policy(page))
    assert allowed
    run = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run}
    assert digests == set(allowed[1].split())
    assert policy(page).startswith("default-src 'none'")


def test_links_lead_to_the_audits_pages(make_run: Make) -> None:
    run = make_run(shards=4)
    page = Page(run.build())
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag == "a"]
    assert links[0] == "../audits/set-5e7.html"
    assert [(run.store / "report" / link).resolve() for link in links[1:]] == [
        path.with_suffix(".html").resolve() for path in run.audits
    ]
    assert all((run.store / "report" / link).is_file() for link in links[1:])


def test_the_same_inputs_give_the_same_bytes_in_any_order(make_run: Make) -> None:
    run = make_run(windows=3)
    first = run.build("one")
    run.audits.reverse()
    run.train.reverse()
    run.specs = dict(reversed(run.specs.items()))
    assert run.build("two") == first


def test_audit_limits_do_not_decide_the_page(make_run: Make) -> None:
    run = make_run()
    first = run.build("one")
    assert "0.1234567" not in first
    for path in run.audits:
        value = json.loads(path.read_text())
        value["limits"]["max_spike"], value["limits"]["short_tokens"] = 0.9, 40
        path.write_text(json.dumps(value))
    run.specs["audit"] = {"version": 1, "limits": {"max_spike": 0.9}}
    assert run.build("two") == first


def test_windows_follow_one_another(make_run: Make) -> None:
    run = make_run(windows=3, epochs=2)
    page = Page(run.build())
    assert "144 steps in 3 windows of hidden states, on 588 rows" in page.text
    figures = page.data("figures")
    steps = figures["plot-loss"]["data"][0]["x"]
    assert steps == list(range(1, 145))
    assert [shape["x0"] for shape in figures["plot-loss"]["layout"]["shapes"]] == [48.5, 96.5]
    assert figures["plot-learning-rate"]["data"][0]["x"] == steps
    assert figures["plot-loss"]["data"][1]["x"] == [24, 48, 72, 96, 120, 144]
    assert "588 rows in 3 windows, 2 epochs each" in page.text


@pytest.mark.parametrize(("first", "kind"), [(95.0, "log"), (9.5, None)])
def test_a_steep_start_does_not_flatten_the_loss_curve(make_run: Make, first: float, kind: str | None) -> None:
    run = make_run()
    value = json.loads(run.train[0].read_text())
    value["curve"][0]["loss"] = first
    run.train[0].write_text(json.dumps(value))
    assert Page(run.build()).data("figures")["plot-loss"]["layout"]["yaxis"].get("type") == kind


@pytest.mark.parametrize("count", [1, 30])
def test_any_number_of_sources(make_run: Make, count: int) -> None:
    run = make_run(sources=[f"source-{number}" for number in range(count)])
    page = Page(run.build())
    assert len(page.data("figures")["plot-sources"]["layout"]["yaxis"]["ticktext"]) == count
    assert all(page.text.count(f"source-{number} ") >= 2 for number in range(count))


def test_divergences_are_listed_with_their_gap(make_run: Make) -> None:
    run = make_run()
    assert "All 16 answers are equal" in Page(run.build("none")).text
    run.evaluation["identical"] = 15
    run.evaluation["divergences"] = [
        {"decoder": "drafter", "prompt_id": "abc123", "position": 17, "gap": 0.00042},
        {"decoder": "prompt_lookup", "prompt_id": "def456", "position": 3, "gap": 0.00031},
    ]
    text = Page(run.build("two")).text
    assert "With the drafter 15 of 16 answers equal" in text
    assert "at most 0.00042 apart" in text
    assert "abc123 drafter 17 0.00042" in text
    assert "def456 prompt lookup 3 0.00031" in text


def test_no_held_out_score_and_no_bad_record(make_run: Make) -> None:
    run = make_run()
    run.counts |= {"bad": {}, "duplicates": 0, "beyond_max_prompts": 0}
    value = json.loads(run.train[0].read_text())
    value["held_out_rows"] = 0
    for epoch in value["epochs"]:
        del epoch["held_out"]
    run.train[0].write_text(json.dumps(value))
    page = Page(run.build())
    assert "none left out" in page.text
    assert [trace["name"] for trace in page.data("figures")["plot-slots"]["data"]] == ["train, epoch 3"]


@pytest.mark.parametrize("name", ["evaluation", "train", "audit"])
@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_input_is_named_in_one_sentence(make_run: Make, name: str, text: str) -> None:
    run = make_run()
    paths = {"evaluation": run.evaluation_path, "train": run.train[0], "audit": run.audits[0]}
    if name == "evaluation":
        run.evaluation = json.loads(text) if text != "{" else {}
    else:
        paths[name].write_text(text)
    with pytest.raises(UserError, match=re.escape(str(paths[name]))) as caught:
        run.build()
    assert "\n" not in str(caught.value)
    assert not (run.store / "report").exists()


def test_no_window_at_all(make_run: Make) -> None:
    run = make_run(windows=0)
    with pytest.raises(UserError, match=r"train\.json"):
        run.build()
