"""Sources on S3, against a server on this machine."""

import json
import os
import threading

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.errors import UserError
from draftmill.prompts import s3
from draftmill.prompts.files import find, opened
from draftmill.prompts.read import read
from draftmill.store import s3 as store_s3
from draftmill.store.settings import S3Settings
from tests.chaos.proxy import Proxy
from tests.s3.weed import Weed

moto_server = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def endpoint():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    store_s3._client.cache_clear()
    resource = boto3.resource("s3").Bucket(f"data-{os.urandom(4).hex()}")
    resource.create()
    yield resource
    store_s3._client.cache_clear()


@pytest.fixture
def proxy(endpoint, bucket):
    """A door before the server that can be shut, with a setting that goes through it."""
    found = Proxy(int(endpoint.rpartition(":")[2]))
    found.settings = {"endpoint_url": found.endpoint, "path_style": True, "retries": 1, "wait_s": 60.0}
    yield found
    found.close()


def lines(count, start=0):
    return "".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(start, start + count)).encode()


def put(bucket, key, body):
    bucket.put_object(Key=key, Body=body)
    return f"s3://{bucket.name}/{key}"


def test_a_build_from_s3_is_the_build_from_the_folder(build, data, bucket, tmp_path, monkeypatch):
    (data.folder / "a.jsonl").write_bytes(lines(50))
    pq.write_table(pa.table({"prompt": [f"row {n}" for n in range(50)]}), data.folder / "b.parquet")
    for file in data.folder.iterdir():
        put(bucket, f"set/{file.name}", file.read_bytes())
    put(bucket, "setting/c.jsonl", lines(5, 900))
    monkeypatch.setattr(s3, "_RANGE", 700)
    local, remote = build(data.folder, write=False), build(f"s3://{bucket.name}/set")
    assert remote.shards == local.shards
    assert remote.counts == local.counts
    assert [source.digest[:5] for source in remote.sources] == ["etag:", "etag:"]
    monkeypatch.setattr("draftmill.prompts.index.scan", None)
    assert build(f"s3://{bucket.name}/set") == remote


def test_objects_folders_and_globs(bucket):
    urls = [put(bucket, key, b"x") for key in ("a/1.jsonl", "a/2.csv", "a/deep/3.jsonl", "ab.jsonl")]
    put(bucket, "a/README", b"x")

    def found(path):
        return [file.path for file in find(path)]

    root = f"s3://{bucket.name}"
    assert found(urls[0]) == urls[:1]
    assert found(f"{root}/a") == found(f"{root}/a/") == urls[:3]
    assert found(f"{root}/a/*.jsonl") == urls[:1]
    assert found(f"{root}/**/*.jsonl") == [urls[0], urls[2], urls[3]]
    assert found(root) == found(f"{root}/") == urls


def test_an_object_can_be_sought_in(bucket, monkeypatch):
    content = bytes(range(256)) * 20
    monkeypatch.setattr(s3, "_RANGE", 300)
    (file,) = find(put(bucket, "a.jsonl", content))
    with opened(file) as stream:
        assert stream.read() == content
        assert (stream.seek(1000), stream.read(10)) == (1000, content[1000:1010])
        assert (stream.seek(-5, os.SEEK_END), stream.read()) == (len(content) - 5, content[-5:])


def test_an_object_replaced_meanwhile_is_noticed(bucket):
    url = put(bucket, "a.jsonl", lines(10))
    (file,) = find(url)
    put(bucket, "a.jsonl", lines(11))
    with pytest.raises(UserError) as caught:
        list(read(file))
    assert str(caught.value) == f"{url} changed while it was read: run again when it is complete."


def test_faults_are_one_sentence(build, bucket, monkeypatch):
    with pytest.raises(UserError) as caught:
        build("s3://no-such-bucket-here/a.jsonl")
    assert str(caught.value) == (
        f"s3://no-such-bucket-here names a bucket that does not exist at {os.environ['AWS_ENDPOINT_URL']}: "
        "create it, or mend its name in the configuration."
    )
    with pytest.raises(UserError) as caught:
        build(f"s3://{bucket.name}/none")
    assert str(caught.value) == (
        f"s3://{bucket.name}/none matches no JSONL, JSON, CSV or Parquet file: correct prompts.sources."
    )
    empty = put(bucket, "empty.jsonl", b"")
    with pytest.raises(UserError) as caught:
        build(empty)
    assert str(caught.value) == f"{empty} is empty: fill it or take it out of prompts.sources."
    with pytest.raises(UserError) as caught:
        build("s3:///a.jsonl")
    assert str(caught.value) == "s3:///a.jsonl names no bucket: write s3://bucket/key in prompts.sources."


def test_no_credentials_is_one_sentence(build, bucket, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    store_s3._client.cache_clear()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError) as caught:
        build(f"s3://{bucket.name}/a.jsonl")
    assert str(caught.value) == (
        f"s3://{bucket.name} needs credentials and there are none: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE, and see the policy in docs/s3.md for the rights."
    )


def test_a_broken_connection_is_read_on(bucket, monkeypatch):
    """The first reply breaks off; the second is whole."""
    from botocore.exceptions import IncompleteReadError
    from botocore.response import StreamingBody

    (file,) = find(put(bucket, "a.jsonl", lines(50)))
    broken = []
    real = StreamingBody.read

    def flaky(self, amt=None):
        if not broken:
            broken.append(1)
            raise IncompleteReadError(actual_bytes=1, expected_bytes=2)
        return real(self, amt=amt)

    monkeypatch.setattr(StreamingBody, "read", flaky)
    assert len(list(read(file))) == 50
    assert broken


@pytest.mark.parametrize("mode", ["down", "overloaded", "expired"])
def test_a_service_that_is_away_is_waited_for(build, bucket, proxy, mode, capfd):
    url = put(bucket, "a.jsonl", lines(50))
    proxy.mode = mode
    back = proxy.back_once_refused(2)
    index = build(url, s3=proxy.settings)
    back.join()
    assert index.counts.read == 50
    said = capfd.readouterr().err
    assert ("the credentials have expired" if mode == "expired" else f"s3://{bucket.name} does not answer") in said
    assert f"s3://{bucket.name} answers again after" in said


@pytest.mark.parametrize("mode", ["down", "overloaded", "expired"])
def test_an_outage_in_the_middle_of_an_object_is_waited_for(bucket, proxy, mode, monkeypatch):
    for name in ("s3._RANGE", "files._BUFFER"):
        monkeypatch.setattr(f"draftmill.prompts.{name}", 500)
    (file,) = find(put(bucket, "a.jsonl", lines(200)), s3=S3Settings(**proxy.settings))
    records = read(file)
    first = next(records)
    proxy.mode = mode
    back = proxy.back_once_refused(2)
    assert len([first, *records]) == 200
    back.join()
    assert proxy.refused >= 2


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("down", "late", "does not answer at http://127.0.0.1"),
        ("overloaded", "late", "(503 SlowDown)"),
        ("expired", "expired", "the credentials have expired: renew them and give the same command again"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_when_patience_ends_it_is_no_mistake(build, bucket, proxy, mode, kind, words, name, data):
    pq.write_table(pa.table({"prompt": ["one", "two"]}), data.folder / "a.parquet")
    url = put(bucket, name, lines(9) if name == "a.jsonl" else (data.folder / name).read_bytes())
    impatient = {**proxy.settings, "wait_s": 0.0}
    (file,) = find(url, s3=S3Settings(**impatient))
    for request in (lambda: build(url, s3=impatient), lambda: list(read(file))):
        with proxy.outage(mode), pytest.raises(UserError) as caught:
            request()
        assert caught.value.kind == kind
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_service_that_is_down_at_the_start_and_comes_back(build, tmp_path, monkeypatch):
    """SeaweedFS itself: nobody listens when the sources are looked for."""
    with Weed(tmp_path / "weed") as weed:
        for name, value in weed.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        weed.client().put_object(Bucket=weed.bucket, Key="set/a.jsonl", Body=lines(40))
        weed.kill()
        starter = threading.Timer(1.0, lambda: weed.start(wait=False))
        starter.start()
        index = build(weed.url("set"), s3={"endpoint_url": weed.endpoint, "retries": 1, "wait_s": 60.0})
        starter.join()
    assert index.counts.read == 40
