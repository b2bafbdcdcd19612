"""The storage plugin on a real S3 service, driven as Snakemake drives it."""

import asyncio
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from snakemake_interface_storage_plugins.registry import StoragePluginRegistry

from draftmill.default_storage import Seen, _hand_over
from draftmill.store.s3_wire import PART_BYTES, Stored
from snakemake_storage_plugin_s3lean import StorageObject, StorageProvider, StorageProviderSettings
from tests.s3.counting import Door
from tests.s3.weed import ACCESS_KEY, SECRET_KEY, Weed


class Exists(dict[str, bool]):
    """As in snakemake.io.ExistsDict: what is below a finished folder and not in it is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.has_inventory: set[str] = set()


class Cache:
    def __init__(self) -> None:
        self.exists_in_storage, self.mtime, self.size = Exists(), {}, {}


@pytest.fixture
def door(weed):
    with Door(weed.port) as door:
        yield door


class Said(logging.Handler):
    """What a provider has told its logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def make(weed: Weed, door, tmp_path, s3_store, said):
    """A provider as one run of Snakemake has it, over the prefix of `s3_store`."""

    def provider(name: str = "one", **settings: object) -> StorageProvider:
        values = {"inventory_prefix": s3_store.url, "wait_s": 5.0, "endpoint_url": door.endpoint, **settings}
        logger = logging.Logger("plugin")
        logger.addHandler(said)
        return StorageProvider(
            local_prefix=tmp_path / name,
            logger=logger,
            settings=StorageProviderSettings(access_key=ACCESS_KEY, secret_key=SECRET_KEY, **values),
        )

    return provider


def local(thing: StorageObject, data: bytes | None = None):
    path = thing.local_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if data is not None:
        path.write_bytes(data)
    return path


def inventory(thing: StorageObject) -> Cache:
    cache = Cache()
    asyncio.run(thing.inventory(cache))
    return cache


def test_snakemake_finds_the_plugin_and_never_guesses_it(tmp_path):
    registry = StoragePluginRegistry()
    assert registry.get_plugin("s3lean").is_read_write()
    assert not registry.get_plugin("s3lean").storage_provider.is_valid_query("s3://bucket/a")


def test_a_provider_asks_nothing_before_it_must(make, door):
    provider = make()
    thing = provider.object("s3://bucket/a/b")
    assert thing.is_valid_query()
    assert (thing.key, thing.local_suffix()) == ("a/b", "bucket/a/b")
    assert "s3c" not in vars(provider)
    assert door.requests == []


def test_one_listing_answers_for_present_and_missing(make, door, s3_store):
    for key in ("a/one", "b/c/two"):
        s3_store.put(key, b"12345")
    provider = make()
    del door.requests[:]
    first = provider.object(f"{s3_store.url}/a/one")
    cache = inventory(first)
    for key in ("a/three", "b/c/two"):
        asyncio.run(provider.object(f"{s3_store.url}/{key}").inventory(cache))
    assert door.counts() == {"LIST": 1}

    def name(key: str) -> str:
        return provider.object(f"{s3_store.url}/{key}").cache_key()

    assert {key for key in ("a/one", "b/c/two", "b/c", "b") if cache.exists_in_storage.get(name(key))} == {
        *("a/one", "b/c/two", "b/c", "b")
    }
    assert cache.size[name("a/one")] == 5
    assert cache.mtime[name("b/c/two")].storage() == s3_store.info("b/c/two").modified
    assert provider.object(f"{s3_store.url}/a/three").get_inventory_parent() in cache.exists_in_storage.has_inventory


def test_a_listing_that_the_workflow_has_made_is_not_made_again(make, door, s3_store):
    provider = make()
    provider.take(s3_store.bucket, s3_store.prefix, [(f"{s3_store.prefix}a", Stored(3, 1.0))])
    thing = provider.object(f"{s3_store.url}/a")
    cache = inventory(thing)
    assert cache.exists_in_storage[thing.cache_key()]
    assert (thing.exists(), thing.size(), thing.mtime()) == (True, 3, 1.0)
    assert door.requests == []


def test_without_a_prefix_each_folder_is_listed_once(make, door, s3_store):
    s3_store.put("a/one", b"")
    s3_store.put("b/two", b"")
    provider, cache = make(inventory_prefix=None), Cache()
    for key in ("a/one", "a/x", "b/two", "b/y"):
        asyncio.run(provider.object(f"{s3_store.url}/{key}").inventory(cache))
    assert door.counts() == {"LIST": 2}


@pytest.mark.parametrize("size", [5, PART_BYTES + 1], ids=["one request", "parts"])
def test_what_is_stored_has_its_digest_and_is_retrieved(make, s3_store, size):
    data = os.urandom(size)
    thing = make().object(f"{s3_store.url}/a/one")
    local(thing, data)
    asyncio.run(thing.managed_store())
    assert s3_store.get("a/one") == data
    assert s3_store.info("a/one").sha256
    again = make("two").object(f"{s3_store.url}/a/one")
    asyncio.run(again.managed_retrieve())
    assert again.local_path().read_bytes() == data
    assert again.exists()
    assert not make("three").object(f"{s3_store.url}/a/two").exists()


def test_the_loser_of_a_race_takes_the_winners_bytes(make, s3_store):
    mine = make().object(f"{s3_store.url}/a/one")
    inventory(mine)
    s3_store.put("a/one", b"the other run's")
    path = local(mine, b"mine")
    asyncio.run(mine.managed_store())
    assert s3_store.get("a/one") == b"the other run's"
    assert path.read_bytes() == b"the other run's"


@pytest.mark.parametrize("size", [4, PART_BYTES + 1], ids=["small, if told to look", "large"])
def test_what_a_job_has_sent_is_not_sent_again(make, door, s3_store, size):
    s3_store.put("a/one", b"s" * size)
    mine = make(look_first=size <= PART_BYTES).object(f"{s3_store.url}/a/one")
    local(mine, b"s" * size)
    del door.requests[:]
    asyncio.run(mine.managed_store())
    assert (mine.exists(), mine.size(), mine.mtime()) == (True, size, s3_store.info("a/one").modified)
    assert door.counts() == {"HEAD": 1}


def test_the_same_bytes_of_another_run_are_ours(make, s3_store, said):
    s3_store.put("a/one", b"same")
    mine = make().object(f"{s3_store.url}/a/one")
    local(mine, b"same")
    asyncio.run(mine.managed_store())
    assert mine.mtime() == s3_store.info("a/one").modified
    assert said.lines == []


@pytest.mark.parametrize("look_first", [False, True])
def test_a_small_file_costs_one_put_and_its_reply_answers_what_is_asked_then(make, door, s3_store, look_first):
    thing = make(look_first=look_first).object(f"{s3_store.url}/a/one")
    local(thing, b"12345")
    asyncio.run(thing.managed_store())
    for _ in range(2):
        assert (asyncio.run(thing.managed_exists()), asyncio.run(thing.managed_size())) == (True, 5)
        assert abs(asyncio.run(thing.managed_mtime()) - s3_store.info("a/one").modified) < 60
    assert door.counts() == ({"HEAD": 1, "PUT": 1} if look_first else {"PUT": 1})


@pytest.mark.parametrize(("alone", "asked"), [(True, {}), (False, {"HEAD": 1})])
def test_what_the_listing_lacked_is_asked_for_only_where_another_process_stores(make, door, s3_store, alone, asked):
    provider = make()
    provider.alone = lambda: alone
    thing = provider.object(f"{s3_store.url}/a/one")
    inventory(thing)
    del door.requests[:]
    assert not thing.exists()
    assert door.counts() == asked


def test_what_was_there_when_the_run_was_planned_may_be_replaced(make, s3_store):
    s3_store.put("a/one", b"old")
    mine = make().object(f"{s3_store.url}/a/one")
    inventory(mine)
    local(mine, b"new")
    asyncio.run(mine.managed_store())
    assert s3_store.get("a/one") == b"new"


@pytest.mark.parametrize("look_first", [False, True])
def test_only_what_was_seen_or_stored_is_removed_and_never_the_bucket(make, s3_store, look_first):
    provider = make(look_first=look_first)
    provider.temporary = frozenset({(s3_store.bucket, f"{s3_store.prefix}temporary")})
    s3_store.put("seen", b"")
    inventory(provider.object(f"{s3_store.url}/seen"))
    for key in ("stored", "temporary"):
        stored = provider.object(f"{s3_store.url}/{key}")
        local(stored, b"")
        asyncio.run(stored.managed_store())
    s3_store.put("another's", b"")
    for key in ("seen", "stored", "temporary", "another's"):
        thing = provider.object(f"{s3_store.url}/{key}")
        assert thing.exists()
        asyncio.run(thing.managed_remove())
    # Where jobs publish by themselves a finished output stays, although the job's next one cannot be stored.
    assert sorted(s3_store.list()) == (["another's", "stored"] if look_first else ["another's"])
    for key in s3_store.list():
        s3_store.delete(key)
    assert s3_store.list() == {}, "the bucket is still there"


def test_outputs_that_are_not_all_of_their_job_are_removed_by_nobody_but_the_job(make, s3_store):
    keys = ("whole", "part", "states")
    for key in keys:
        s3_store.put(key, b"")
    provider = make()
    _hand_over(provider, s3_store.url, Seen(s3_store.list(), parts=["part"], temporary=["states", "to come"]))
    for key in keys:
        asyncio.run(provider.object(f"{s3_store.url}/{key}").managed_remove())
    assert list(s3_store.list()) == ["part"]
    assert provider.temporary == {(s3_store.bucket, f"{s3_store.prefix}{key}") for key in ("states", "to come")}


def test_where_jobs_publish_themselves_what_stands_there_is_taken(make, s3_store):
    """Another run has overrun the job behind its publication: all its outputs stand, and none of ours goes among them."""
    s3_store.put("a/one", b"old")
    mine = make(look_first=True).object(f"{s3_store.url}/a/one")
    inventory(mine)
    path = local(mine, b"ours")
    s3_store.put("a/one", b"the other run's")
    asyncio.run(mine.managed_store())
    assert s3_store.get("a/one") == path.read_bytes() == b"the other run's"


def test_a_folder_is_stored_seen_and_retrieved(make, s3_store):
    thing = make().object(f"{s3_store.url}/folder")
    for name in ("a", "b/c"):
        path = thing.local_path() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    asyncio.run(thing.managed_store())
    again = make("two").object(f"{s3_store.url}/folder")
    cache = inventory(again)
    assert cache.exists_in_storage[again.cache_key()]
    assert again.exists()
    asyncio.run(again.managed_retrieve())
    assert (again.local_path() / "b/c").read_text() == "b/c"
    asyncio.run(again.managed_remove())
    assert s3_store.list() == {}


@pytest.mark.slow
def test_a_storage_that_is_away_is_waited_for_and_then_given_up(make, s3_store, said):
    provider = make(endpoint_url="http://127.0.0.1:9", wait_s=4.0, retries=1)
    thing = provider.object(f"{s3_store.url}/a")
    with pytest.raises(Exception, match="Failed to check existence"):
        asyncio.run(thing.managed_exists())
    assert any("http://127.0.0.1:9 does not answer" in line for line in said.lines)


SNAKEFILE = """
rule all:
    input: expand("out/{n}.txt", n=range(3)), "folder"
rule one:
    output: "out/{n}.txt"
    shell: "echo {wildcards.n} > {output}"
rule folder:
    input: expand("out/{n}.txt", n=range(3))
    output: directory("folder")
    shell: "mkdir {output}; cat {input} > {output}/all; echo x > {output}/x"
"""


@pytest.mark.slow
def test_any_workflow_may_use_it_by_name(weed, door, s3_store, tmp_path):
    (tmp_path / "Snakefile").write_text(textwrap.dedent(SNAKEFILE))
    environment = {
        **os.environ,
        "SNAKEMAKE_STORAGE_S3LEAN_ACCESS_KEY": ACCESS_KEY,
        "SNAKEMAKE_STORAGE_S3LEAN_SECRET_KEY": SECRET_KEY,
    }

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "snakemake", "--cores", "2", "--default-storage-provider", "s3lean"]
        command += ["--default-storage-prefix", s3_store.url, "--storage-s3lean-endpoint-url", door.endpoint]
        done = subprocess.run(
            [*command, "--storage-s3lean-inventory-prefix", s3_store.url, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run()
    assert s3_store.get("folder/all") == b"0\n1\n2\n"
    del door.requests[:]
    assert "Nothing to be done" in run("-n")
    assert door.counts() == {"LIST": 1}
