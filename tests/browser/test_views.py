"""Each view on each store: what it shows, in both colours, on a phone, for keyboards and for screen readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.browser.conftest import VIEWS, Served, drawn, holds, settled, show
from tests.state.made_store import MadeStore
from tests.tiny import make_tokenizer

STORES = ("small", "big", "built")
TITLES = {"overview": ("Overview", "Finished"), "quality": ("Data quality",)}


@pytest.fixture(params=STORES)
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible_and_fits_in_both_colours_and_on_a_phone(
    new_page: Callable[..., Page], served: Served, view: str
) -> None:
    for width, scheme in ((1280, "light"), (390, "dark")):
        page = new_page(width=width, height=844, scheme=scheme)
        show(page, served, view)
        drawn(page)
        assert page.inner_text("h1").startswith(TITLES.get(view, (view.capitalize(),)))
        assert page.get_attribute("nav a[aria-current]", "href") == f"#{view}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "no scrolling sideways"
        found = Axe().run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
        assert bad == []


def test_overview_counts_what_the_store_holds(page: Page, big: Served, big_made: MadeStore) -> None:
    show(page, big, "overview")
    generate = page.inner_text(".pipeline li[data-key=generate]")
    assert f"{len(big_made.generated):,} of 2,000" in generate
    assert "failed" in generate
    assert page.locator(".failures li").count() == big_made.failures + big_made.broken_audits


def test_quality_names_the_spike_and_the_shards_over_a_limit(page: Page, big: Served) -> None:
    show(page, big, "quality")
    drawn(page)
    settled(page, "The most common exact number of loss tokens is")
    assert "exactly " in page.inner_text("#plot-loss")
    assert page.locator(".note a.mono").count() == 2
    page.locator(".note a.mono").first.click()
    settled(page, "completions/")


def test_samples_colour_the_mask_and_show_special_tokens(page: Page, built: Served) -> None:
    show(page, built, "samples")
    page.wait_for_selector("article.row")
    assert page.locator("article .prompt.special").first.inner_text().startswith("<|im_start|>")
    assert page.locator("article .trained").count() > 0


def test_a_mask_inside_an_answer_is_coloured(page: Page, tmp_path: Path) -> None:
    """Imported answers are trained on from their twelfth token; the tokenizer has one token a byte."""
    make_tokenizer(tmp_path / "target")
    (tmp_path / "target/config.json").write_text('{"max_position_embeddings": 512}')
    made = MadeStore(shards=10, phase="finished", changes={"target": {"model": str(tmp_path / "target")}})
    with Served(made.write(tmp_path / "store")) as served:
        show(page, served, "samples?kind=search&text=%23+thinking")
        page.wait_for_selector("article.row")
        for article in page.locator("article.row").all():
            assert article.locator(".masked").all_inner_texts() == ["# thinking\n"]
            trained = article.locator(".trained").all_inner_texts()
            assert "# answer" in trained[0]
            assert trained[-1] == "<|im_end|>"
        colours = page.evaluate(
            "[...['masked', 'trained', 'prompt']].map((name) => "
            "getComputedStyle(document.querySelector(`article .${name}`)).backgroundColor)"
        )
        assert len({*colours, "rgba(0, 0, 0, 0)"}) == 4


def test_without_a_tokenizer_the_page_says_so(page: Page, small: Served) -> None:
    show(page, small, "samples?kind=search&text=%23+thinking")
    page.wait_for_selector("article.row")
    settled(page, "The target's tokenizer is not on this machine")


def test_a_search_is_paged_inside_a_shard_and_over_shards(page: Page, small: Served) -> None:
    show(page, small, "samples?kind=search&text=lantern")
    seen: list[str] = []
    for _ in range(4):
        page.wait_for_selector("article.row")
        keys = page.eval_on_selector_all("article.row", "(rows) => rows.map((row) => row.dataset.key)")
        assert len(keys) == 12
        assert not set(keys) & set(seen)
        seen += keys
        page.click("button:has-text('Search on')")
        holds(page, "(key) => document.querySelector('article.row')?.dataset.key !== key", keys[0])
    page.fill("input[name=text]", "castle")
    page.keyboard.press("Enter")
    holds(page, "!location.hash.includes('skip=')")


def test_what_was_typed_and_what_options_stand_for_stay_as_they_are(page: Page, small: Served) -> None:
    """Persian and Hindi need joiners that nobody can see; a field that spelt them out would ask for other words."""
    text = "می\u200cخواهم \u00ad"
    show(page, small, "samples")
    page.fill("input[name=text]", text)
    page.keyboard.press("Enter")
    settled(page, "0 rows from")
    assert page.input_value("input[name=text]") == text
    assert page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('text')") == text


def test_a_source_is_chosen_for_lengths_and_finish_reasons(page: Page, small: Served) -> None:
    show(page, small, "quality")
    drawn(page)
    audits = page.evaluate("fetch('api/quality').then((answer) => answer.json())")
    page.select_option("select[name=source]", "code")
    settled(page, "Finish reasons and rejections of code")
    [value, rows] = audits["by_source"]["code"]["spike"]
    settled(page, f"The most common exact number of loss tokens is {value}: {rows} answers")
    table = page.locator("[aria-label='Finish reason'] tbody").inner_text().split()
    assert table == [
        part for name, count in audits["by_source"]["code"]["finish"].items() for part in (name, f"{count:,}")
    ]
    assert audits["by_source"]["code"]["finish"] != audits["overall"]["finish"]


def test_samples_are_chosen_and_searched_by_hand(page: Page, small: Served) -> None:
    show(page, small, "samples")
    page.wait_for_selector("article.row")
    page.select_option("select[name=kind]", "rejected")
    settled(page, "are all")
    page.select_option("select[name=kind]", "shortest")
    settled(page, "4 trained")
    page.fill("input[name=text]", "lantern")
    page.keyboard.press("Enter")
    holds(page, "location.hash.includes('text=lantern')")
    holds(page, "[...document.querySelectorAll('article .text')].some((one) => /lantern/i.test(one.innerText))")


def test_shards_are_sorted_filtered_and_opened(page: Page, big: Served, big_made: MadeStore) -> None:
    show(page, big, "shards")
    assert page.locator("tbody tr").count() == 50
    page.click("thead button:has-text('rejected')")
    page.click("thead button:has-text('rejected')")
    page.wait_for_selector("th[aria-sort=descending]")
    assert page.locator("tbody tr").first.locator("td").nth(7).inner_text() == "1"
    page.select_option("select[name=verdict]", "fail")
    settled(page, f"{big_made.broken_audits} of 2,000 shards")
    name = page.locator("tbody th").first.inner_text()
    page.locator("tbody th a").first.click()
    settled(page, f"Shard {name}")
    settled(page, "tail -n 40 logs/generate/")
    page.click("text=What it was made of")
    assert "fingerprint" in page.locator("details[open] pre").first.inner_text()


def test_a_shard_of_a_real_build_tells_its_record_and_its_log(page: Page, built: Served) -> None:
    show(page, built, "shards")
    page.locator("tbody th a").first.click()
    page.wait_for_selector("text=Record of the job")
    page.click("text=End of the log >> nth=0")
    assert page.locator("details[open] pre").first.inner_text().strip()
    page.click("text=Record of the job >> nth=0")
    settled(page, "sha256")


def test_training_shows_what_was_measured(page: Page, built: Served) -> None:
    show(page, built, "training")
    drawn(page)
    settled(page, "(this build)")
    assert page.locator("#plot-positions .scatterlayer .trace").count() >= 2


def test_lanes_show_spans_servers_and_verdicts(page: Page, big: Served) -> None:
    show(page, big, "lanes")
    for part in (".span.stage-generate", ".span.server", ".gate.is-free", ".span.is-failed"):
        assert page.locator(part).count() > 0, part
    page.select_option("select[name=hours]", "24")
    page.wait_for_selector(".span.stage-extract")


def test_spans_are_listed_for_keyboards_and_phones(new_page: Callable[..., Page], big: Served) -> None:
    page = new_page(width=390)
    show(page, big, "lanes")
    page.locator("summary", has_text="Spans").first.focus()
    page.keyboard.press("Enter")
    listed = page.locator("details[open] tbody tr")
    assert 1 < listed.count() <= 60
    assert {"generate", "server"} <= {row.locator("td").first.inner_text() for row in listed.all()}
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_theme_is_chosen_and_kept(page: Page, small: Served) -> None:
    show(page, small, "overview")
    colours = set()
    for _ in range(3):
        page.click("button[aria-label^=Theme]")
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    page.click("button[aria-label^=Theme]")
    page.click("button[aria-label='Theme: light']")
    page.reload()
    page.wait_for_selector("button[aria-label='Theme: dark']")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_keyboard_reaches_everything(page: Page, small: Served) -> None:
    show(page, small, "overview")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    show(page, small, "quality")
    page.focus("#skip")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
        if reached[-1] == "Shards":
            break
    assert [
        one for one in reached if one in {"Overview", "Data quality", "Samples", "Lanes", "Training", "Shards"}
    ] == ["Overview", "Data quality", "Samples", "Lanes", "Training", "Shards"]
    page.keyboard.press("Enter")
    settled(page, "of 60 shards")
    assert page.evaluate("document.activeElement.textContent") == "Shards", "the focus stays where it was"
    page.focus("thead button >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector("th[aria-sort=ascending]")
    assert page.evaluate("document.activeElement.textContent").startswith("shard")
    page.focus("tbody th a >> nth=0")
    page.keyboard.press("Enter")
    settled(page, "← all shards")
