"""`weed`: one SeaweedFS a session; other rooms import it into their conftest."""

import secrets
from collections.abc import Iterator

import pytest

from draftmill.store.s3 import S3Store
from draftmill.store.settings import S3Settings
from tests.s3.weed import Weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A running service. Whoever kills it starts it again."""
    with Weed(tmp_path_factory.mktemp("weed")) as service:
        yield service


@pytest.fixture
def s3_environment(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Weed:
    """The service as the AWS variables of this process."""
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return weed


@pytest.fixture
def s3_store(s3_environment: Weed) -> S3Store:
    """An empty store under a prefix of its own."""
    return S3Store(
        s3_environment.url(f"store-{secrets.token_hex(4)}"), S3Settings(endpoint_url=s3_environment.endpoint)
    )
