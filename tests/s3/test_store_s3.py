"""The store on a real S3 service: whole objects, one winner, digests, and one sentence for everything a person can mend."""

import os
import threading
import time
from dataclasses import replace

import pytest
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.store import s3 as s3_module
from draftmill.store.open import open_store
from draftmill.store.s3 import S3Store
from draftmill.store.s3_errors import StoreAwayError
from draftmill.store.s3_wire import PART_BYTES
from draftmill.store.selftest import check_store
from draftmill.store.settings import S3Settings

LARGE = 2 * PART_BYTES + 12_345
KEYS = st.text(st.sampled_from("ab/._-=+@,é %"), min_size=1, max_size=12).filter(
    lambda key: all(part not in ("", ".", "..") for part in key.split("/"))
)


def sentence(store: S3Store) -> str:
    with pytest.raises(UserError) as caught:
        store.list()
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_a_name_opens_its_kind_of_store(tmp_path):
    assert open_store(str(tmp_path)).url == str(tmp_path)
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"
    with pytest.raises(UserError, match="names no bucket"):
        open_store("s3:///a")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=KEYS, data=st.binary(max_size=200))
def test_what_was_put_is_what_is_got_and_listed(s3_store, key, data):
    s3_store.put(key, data)
    try:
        assert s3_store.get(key) == data
        listed = s3_store.list()[key]
        info = s3_store.info(key)
        assert info is not None
        assert (listed.size, listed.etag) == (info.size, info.etag) == (len(data), info.etag)
        assert len(info.sha256) == 64
    finally:
        s3_store.delete(key)
    assert key not in s3_store.list()


def test_a_missing_object(s3_store, tmp_path):
    for ask in (s3_store.get, lambda key: s3_store.fetch(key, tmp_path / "file")):
        with pytest.raises(KeyError):
            ask("absent")
    assert s3_store.info("absent") is None
    assert not (tmp_path / "file").exists()
    s3_store.delete("absent")


def test_parts_of_an_object(s3_store):
    s3_store.put("ten", b"0123456789")
    s3_store.put("empty", b"")
    spans = [(0, 10), (2, 5), (8, 99), (3, 3), (5, 2)]
    assert [s3_store.part("ten", *span) for span in spans] == [b"0123456789", b"234", b"89", b"", b""]
    assert s3_store.part("empty", 0, 0) == b""


def test_a_large_file_goes_in_parts_and_comes_back(s3_store, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(LARGE))
    s3_store.publish("large", tmp_path / "file")
    assert "-" in s3_store.list()["large"].etag, "it went as one part"
    s3_store.fetch("large", tmp_path / "folder/back")
    assert (tmp_path / "folder/back").read_bytes() == (tmp_path / "file").read_bytes()
    assert s3_store.info("large").sha256 == s3_module.sha256_file(tmp_path / "file")


@pytest.mark.slow
def test_a_listing_goes_on_behind_a_page_and_knows_its_prefix(s3_store):
    client = s3_store.client
    for number in range(1001):
        client.put_object(Bucket=s3_store.bucket, Key=f"{s3_store.prefix}many/{number:04d}", Body=b"")
    s3_store.put("manyother", b"")
    assert len(s3_store.list("many/")) == 1001
    assert len(s3_store.list("many")) == 1002


def test_a_file_above_the_threshold_goes_in_parts_however_small_it_is(s3_store, tmp_path):
    store = S3Store(s3_store.url, S3Settings(endpoint_url=s3_store.settings.endpoint_url, multipart_threshold=9))
    for name, size in (("nine", 9), ("ten", 10)):
        (tmp_path / name).write_bytes(b"x" * size)
        assert store.offer(name, tmp_path / name)
    assert ["-" in store.list()[name].etag for name in ("nine", "ten")] == [False, True]


@pytest.mark.parametrize("size", [10, LARGE], ids=["one request", "parts"])
def test_of_several_that_offer_an_object_at_once_one_wins(s3_store, tmp_path, size, monkeypatch):
    count, wins = 4, []
    # SeaweedFS may let two completions pass that overlap (4 of 30 rounds), so here they come one after another.
    complete, alone = s3_store.client.complete_multipart_upload, threading.Lock()

    def in_turn(**arguments):
        with alone:
            return complete(**arguments)

    monkeypatch.setattr(s3_store.client, "complete_multipart_upload", in_turn)
    for number in range(count):
        (tmp_path / str(number)).write_bytes(bytes([number]) * size)
    start = threading.Barrier(count)

    def offer(number: int) -> None:
        start.wait()
        if s3_store.offer("one", tmp_path / str(number)):
            wins.append(number)

    threads = [threading.Thread(target=offer, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert s3_store.get("one") == (tmp_path / str(wins[0])).read_bytes()
    assert s3_store.remove_unfinished(-60) == [], "the losers aborted their uploads"


def test_creation_and_replacement_are_conditional(s3_store):
    assert s3_store.create("one", b"1")
    assert not s3_store.create("one", b"1"), "the same bytes of another writer are no success"
    assert not s3_store.replace("one", b"3", b"2")
    assert s3_store.replace("one", b"2", b"1")
    assert not s3_store.replace("gone", b"2", b"1")
    assert s3_store.get("one") == b"2"


def test_a_repeated_creation_that_meets_itself_is_a_success(s3_store, monkeypatch):
    from botocore.exceptions import ReadTimeoutError

    monkeypatch.setattr("draftmill.store.patience.time.sleep", lambda seconds: None)
    client, calls = s3_store.client, []
    put = client.put_object

    def answer_lost(**arguments):
        calls.append(arguments["Key"])
        reply = put(**arguments)
        if len(calls) == 1:
            raise ReadTimeoutError(endpoint_url="here")
        return reply

    monkeypatch.setattr(client, "put_object", answer_lost)
    assert s3_store.create("one", b"1")
    assert len(calls) == 2


def test_an_upload_that_was_completed_is_not_called_unfinished(s3_store, monkeypatch, tmp_path, capsys):
    from botocore.exceptions import ReadTimeoutError

    monkeypatch.setattr("draftmill.store.patience.time.sleep", lambda seconds: None)
    (tmp_path / "file").write_bytes(os.urandom(LARGE))
    client, calls = s3_store.client, []
    complete = client.complete_multipart_upload

    def answer_lost(**arguments):
        calls.append("complete")
        if len(calls) > 1:  # as AWS does it; SeaweedFS agrees a second time
            raise refused(404, "NoSuchUpload")
        complete(**arguments)
        raise ReadTimeoutError(endpoint_url="here")

    def nothing_to_abort(**arguments):
        calls.append("abort")
        raise refused(404, "NoSuchUpload")

    monkeypatch.setattr(client, "complete_multipart_upload", answer_lost)
    monkeypatch.setattr(client, "abort_multipart_upload", nothing_to_abort)
    s3_store.publish("large", tmp_path / "file")
    assert calls == ["complete", "complete", "abort"]
    assert s3_store.get("large") == (tmp_path / "file").read_bytes()
    assert "unfinished" not in capsys.readouterr().err


def refused(status: int, code: str) -> ClientError:
    reply = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(reply, "PutObject")


@pytest.mark.parametrize("fails", [2, 99])
def test_a_conflict_ends_in_a_stored_object_or_an_error(s3_store, monkeypatch, tmp_path, fails):
    naps = []
    monkeypatch.setattr(s3_store, "_patience", replace(s3_store._patience, sleep=naps.append))
    put, calls = s3_store.client.put_object, []
    (tmp_path / "file").write_bytes(b"1")

    def conflict(**arguments):
        calls.append(arguments["Key"])
        if len(calls) <= fails:
            raise refused(409, "ConditionalRequestConflict")
        return put(**arguments)

    monkeypatch.setattr(s3_store.client, "put_object", conflict)
    for send in (lambda: s3_store.put("one", b"1"), lambda: s3_store.publish("one", tmp_path / "file")):
        calls.clear()
        if fails == 2:
            send()
            assert s3_store.get("one") == b"1"
            continue
        with pytest.raises(UserError, match="409 ConditionalRequestConflict"):
            send()
        assert len(calls) == 5
    assert naps
    assert all(seconds > 0 for seconds in naps)


def test_nothing_is_replaced_where_a_store_says_404_instead_of_412(s3_store, monkeypatch):
    s3_store.put("one", b"1")
    put = s3_store.client.put_object

    def as_aws(**arguments):
        if "IfMatch" in arguments:
            s3_store.delete("one")
            raise refused(404, "NoSuchKey")
        return put(**arguments)

    monkeypatch.setattr(s3_store.client, "put_object", as_aws)
    assert not s3_store.replace("one", b"2", b"1")


def test_old_unfinished_uploads_are_aborted_and_young_ones_left(s3_store):
    s3_store.client.create_multipart_upload(Bucket=s3_store.bucket, Key=f"{s3_store.prefix}hung")
    assert s3_store.remove_unfinished(3600) == []
    assert s3_store.remove_unfinished(-60) == [f"{s3_store.url}/hung"]
    assert s3_store.remove_unfinished(-60) == []


def a_second_later() -> None:
    """S3 tells times in whole seconds, so what shall be seen as later must be."""
    time.sleep(1.1)


def test_a_young_upload_is_aborted_once_its_object_came_or_its_job_is_done(s3_store, tmp_path):
    def begin(key):
        s3_store.client.create_multipart_upload(Bucket=s3_store.bucket, Key=f"{s3_store.prefix}{key}")

    s3_store.put("older", b"1")
    a_second_later()
    for key in ("older", "overtaken", "journal/train/one-0/state", "journal/train/one-1/state"):
        begin(key)
    a_second_later()
    s3_store.put("overtaken", b"1")
    gone = [f"{s3_store.url}/{key}" for key in ("journal/train/one-0/state", "overtaken")]
    assert sorted(s3_store.remove_unfinished(3600, done=["journal/train/one-0/"], dry=True)) == gone
    assert sorted(s3_store.remove_unfinished(3600, done=["journal/train/one-0/"])) == gone
    assert len(s3_store.remove_unfinished(-60)) == 2


@pytest.mark.parametrize("there", [False, True])
def test_an_upload_that_another_build_swept_is_sent_again_or_lost(s3_store, tmp_path, monkeypatch, there):
    (tmp_path / "file").write_bytes(os.urandom(LARGE))
    complete, swept = s3_store.client.complete_multipart_upload, []

    def sweep_first(**arguments):
        if not swept:
            swept.append(arguments["UploadId"])
            if there:
                s3_store.put("one", b"another's")
            s3_store.client.abort_multipart_upload(**{key: arguments[key] for key in ("Bucket", "Key", "UploadId")})
        return complete(**arguments)

    monkeypatch.setattr(s3_store.client, "complete_multipart_upload", sweep_first)
    assert s3_store.offer("one", tmp_path / "file") is not there
    assert s3_store.get("one") == (b"another's" if there else (tmp_path / "file").read_bytes())
    assert s3_store.remove_unfinished(-60) == []


@pytest.mark.slow
def test_an_object_survives_a_kill_of_the_service(tmp_path, monkeypatch):
    from tests.s3.weed import Weed

    with Weed(tmp_path) as weed:
        for name, value in weed.environment.items():
            monkeypatch.setenv(name, value)
        store = S3Store(weed.url("a"), S3Settings(endpoint_url=weed.endpoint, wait_s=60))
        store.put("one", b"1")
        weed.kill()
        starter = threading.Timer(2.0, lambda: weed.start(wait=False))
        starter.start()
        assert store.get("one") == b"1", "it was waited for"
        starter.join()


# What a person can mend ---------------------------------------------------------------------------------------------


def test_no_bucket(s3_environment):
    store = S3Store("s3://no-such-bucket/a", S3Settings(endpoint_url=s3_environment.endpoint))
    assert sentence(store).startswith("s3://no-such-bucket/a names a bucket that does not exist")


def test_wrong_secret(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    s3_module._client.cache_clear()
    try:
        store = S3Store(s3_environment.url("a"), S3Settings(endpoint_url=s3_environment.endpoint, region="eu-north-1"))
        assert "refuses these credentials (SignatureDoesNotMatch): set AWS_ACCESS_KEY_ID" in sentence(store)
    finally:
        s3_module._client.cache_clear()


def test_no_credentials(s3_environment, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3_module._client.cache_clear()
    try:
        store = S3Store(s3_environment.url("a"), S3Settings(endpoint_url=s3_environment.endpoint))
        assert "needs credentials and there are none" in sentence(store)
    finally:
        s3_module._client.cache_clear()


@pytest.mark.slow
def test_nobody_at_the_endpoint(s3_environment, capsys):
    store = S3Store("s3://bucket/a", S3Settings(endpoint_url="http://127.0.0.1:9", wait_s=4.0, retries=1))
    with pytest.raises(StoreAwayError, match=r"does not answer at http://127.0.0.1:9 .*check s3.endpoint_url"):
        store.list()
    assert "s3://bucket/a does not answer" in capsys.readouterr().err


# The self test --------------------------------------------------------------------------------------------------------


def test_a_store_that_can_all_is_left_empty(s3_store):
    check_store(s3_store, "progress/.probe", max_skew_s=300)
    assert s3_store.list() == {}


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ("condition", "ignores If-None-Match and lets one build overwrite another's"),
        ("match", "does not honour If-Match"),
        ("metadata", "does not keep metadata"),
        ("clock", "has a clock that differs by"),
    ],
)
def test_a_store_that_lacks_something_is_named_with_what_that_means(s3_store, lack, said, monkeypatch):
    client = s3_store.client
    put, dropped = client.put_object, {"condition": ["IfNoneMatch"], "match": ["IfMatch"], "metadata": ["Metadata"]}

    def forgetful(**arguments):
        return put(**{name: value for name, value in arguments.items() if name not in dropped.get(lack, [])})

    monkeypatch.setattr(client, "put_object", forgetful)
    if lack == "clock":
        now = s3_module.time.time()
        monkeypatch.setattr("draftmill.store.selftest.time.time", lambda: now - 4000)
    with pytest.raises(UserError, match=said):
        check_store(s3_store, "progress/.probe", max_skew_s=300)
    assert s3_store.list() == {}


def test_a_heartbeat_is_not_waited_for(s3_environment):
    from draftmill.store.workplace import without_waiting

    store = without_waiting(S3Store("s3://bucket/a", S3Settings(endpoint_url="http://127.0.0.1:9", wait_s=900)))
    store.put("progress/a.json", b"{}")
