"""`draftmill verify`, `gc`, `adopt` and `show` as a person calls them: what they say, and their exit status."""

import json
import os
import sys
import time

import pytest
import yaml

from draftmill.cli import main
from draftmill.commands.store import size
from draftmill.workflow import current_index
from tests.integrity.damage import flip
from tests.integrity.stores import Toy, settings

DAY = 86400.0


@pytest.fixture
def call(toy, monkeypatch, capsys):
    """Run the command line in the project, with its configuration at the usual place."""
    folder = toy.store.root.parent
    (folder / "config").mkdir()
    (folder / "config/config.yaml").write_text(yaml.safe_dump(settings(folder)))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftmill", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def age(toy, days=30.0):
    for key in toy.store.list():
        os.utime(toy.path(key), (time.time() - days * DAY,) * 2)


def test_a_clean_store_is_said_to_be_and_status_is_0(call, toy):
    code, out, err = call("verify")
    assert (code, err) == (0, "")
    assert out.endswith("footers, keys and sizes: none damaged.\n")
    assert call("verify", "--deep")[1].endswith("every byte: none damaged.\n")


def test_damage_is_status_1_and_quarantine_says_where_it_went(call, toy):
    key = toy.graph.evaluation()
    flip(toy.path(key), 5)
    code, out, _ = call("verify", "--deep")
    assert code == 1
    assert f"- {key}: digest: expected sha256 " in out
    assert "--quarantine moves" in out
    code, out, _ = call("verify", "--deep", "--quarantine")
    assert code == 1
    assert "1 objects were moved to quarantine/0001/; the next build makes them again." in out
    assert call("verify", "--deep")[0] == 0


def test_findings_as_json(call, toy):
    key = toy.graph.pilot()
    toy.path(key).write_bytes(b"")
    code, out, _ = call("verify", "--json", "--seed", 4)
    value = json.loads(out)
    assert code == 1
    assert value["findings"] == [{"key": key, "what": "empty", "expected": "bytes", "found": "none", "damage": True}]
    assert (value["seed"], value["deep"], value["sample"]) == (4, False, 1.0)


def test_missing_records_are_written_when_asked(call, toy):
    for key in toy.store.list("records/"):
        toy.store.delete(key)
    code, out, _ = call("verify", "--deep")
    assert code == 0
    assert "writes the missing records" in out
    code, out, _ = call("verify", "--deep", "--record")
    assert "records were written" in out
    assert "note" not in call("verify", "--deep")[1]
    flip(toy.path(toy.graph.pilot()), 9)
    assert call("verify", "--deep")[0] == 1


def test_no_record_is_written_for_what_is_damaged(call, toy):
    for key in toy.store.list("records/"):
        toy.store.delete(key)
    toy.path(toy.graph.pilot()).write_bytes(b"{}")
    call("verify", "--deep", "--record")
    assert toy.store.list("records/pilot/") == {}
    assert toy.store.list("records/evaluate/") != {}


def test_bytes_that_nobody_looked_at_are_not_recorded(call, toy):
    for key in toy.store.list("records/"):
        toy.store.delete(key)
    code, out, err = call("verify", "--record")
    assert (code, out) == (2, "")
    assert err == (
        "draftmill: --record writes down the bytes that are there as sound: give --deep too, which looks at them.\n"
    )
    assert toy.store.list("records/") == {}


@pytest.mark.parametrize(
    "arguments", [("verify", "--configfile", "absent.yaml"), ("gc", "--configfile", "absent.yaml")]
)
def test_a_mistake_is_one_sentence_and_status_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err == "draftmill: There is no configuration file absent.yaml: give one with --configfile.\n"


def test_prompts_that_were_quarantined_are_published_again_by_the_next_build(call, toy):
    key = toy.graph.prompts(toy.graph.train[0])
    before = toy.store.get(key)
    toy.path(key).write_bytes(before[:50])
    assert call("verify", "--quarantine")[0] == 1
    assert key not in toy.store.list()
    current_index(toy.config, toy.store, write=True)
    assert toy.store.get(key) == before


# gc -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def grown(toy):
    """The store after another learning rate was tried, a month ago."""
    Toy.open(toy.store.root.parent, train={"learning_rate": 1e-3}).build()
    age(toy)
    return toy


def test_gc_is_dry_until_told(call, grown):
    before = set(grown.store.list())
    code, out, _ = call("gc")
    assert code == 0
    assert "drafter               4" in out
    assert "would go; --yes removes them." in out
    assert set(grown.store.list()) == before
    assert "removed." in call("gc", "--yes")[1]
    assert len(set(grown.store.list())) < len(before)
    assert call("verify", "--deep")[0] == 0
    assert call("gc")[1] == "0 objects, 0 bytes, would go; --yes removes them.\n"


def test_every_configuration_that_is_given_keeps_its_own(call, grown, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(settings(grown.store.root.parent, train={"learning_rate": 1e-3})))
    out = call("gc", "--configfile", "config/config.yaml", "--configfile", other)[1]
    assert out.startswith("0 objects")


def test_what_is_young_stays_and_is_counted(call, grown):
    age(grown, days=3)
    out = call("gc", "--yes", "--grace", "7d")[1]
    assert out.startswith("0 objects")
    assert "more are reached by nothing but changed within 7d." in out


def test_gc_refuses_when_a_configuration_cannot_be_read(call, grown, tmp_path):
    before = set(grown.store.list())
    broken = tmp_path / "broken.yaml"
    broken.write_text("device: [")
    code, _, err = call("gc", "--yes", "--configfile", "config/config.yaml", "--configfile", broken)
    assert code == 2
    assert "is not valid YAML" in err
    (grown.store.root.parent / "prompts.jsonl").unlink()
    code, _, err = call("gc", "--yes")
    assert code == 2
    assert set(grown.store.list()) == before


def test_gc_refuses_configurations_of_two_stores(call, grown, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(settings(grown.store.root.parent, store="elsewhere")))
    code, _, err = call("gc", "--configfile", "config/config.yaml", "--configfile", other)
    assert code == 2
    assert "give configurations of one store" in err


# adopt and show -------------------------------------------------------------------------------------------------------


def test_adopt_says_that_there_is_nothing_to_do(call):
    assert call("adopt") == (0, "There is nothing to take over.\n", "")


def test_adopt_is_dry_until_told_and_gc_waits_for_it(call, toy, monkeypatch):
    from draftmill import specs

    with monkeypatch.context() as patch:
        patch.setattr(specs, "SPEC_VERSIONS", {**specs.SPEC_VERSIONS, "audit": 1})
        Toy.open(toy.store.root.parent).build()
    for shard in toy.graph.shards:
        for key in (toy.graph.audit(shard), toy.graph.audit_page(shard)):
            toy.store.delete(key)
    age(toy)
    out = call("adopt")[1]
    assert f"audit                 {len(toy.graph.shards)} still stand" in out
    assert "would be relabelled; --yes does it." in out
    out = call("gc", "--yes")[1]
    assert "`draftmill adopt` would still take them over" in out
    assert call("adopt", "--yes")[0] == 0
    assert call("adopt")[1] == "There is nothing to take over.\n"
    assert call("verify", "--deep")[0] == 0


def test_show_prints_provenance_and_record_of_a_file_and_of_a_key(call, toy):
    key = toy.graph.completions(toy.graph.train[0])
    by_file, by_key = (json.loads(call("show", what)[1]) for what in (toy.path(key), key))
    assert by_file == by_key
    assert by_file["fingerprint"] == toy.graph.specs.fp["generate"]
    assert by_file["record"]["outputs"].keys() == {key, toy.graph.rejected(toy.graph.train[0])}
    assert by_file["record"]["finished"].endswith("+00:00")
    assert json.loads(call("show", toy.graph.drafter(0, "model.safetensors"))[1])["stage"] == "train"


def test_show_of_what_is_not_there_is_one_sentence(call, toy):
    code, out, err = call("show", "eval/0123456789ab.json")
    assert (code, out) == (2, "")
    assert err == f"draftmill: There is no file eval/0123456789ab.json, and no such object in {toy.store.url}.\n"


def test_bytes_for_people():
    assert [size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]
