"""The toy project of tests/tiny.py with its store on S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftmill.store.s3 import S3Store
from draftmill.store.settings import S3Settings
from tests.s3.weed import Weed
from tests.tiny import Project

# What a build leaves beside its objects: it may hold times.
BESIDE = ("progress/", "records/")


class S3Project(Project):
    """Built by the repository's own Snakefile on a running SeaweedFS; `endpoint` may be a door in front of it.

    `requests` has room for what a door has seen.
    """

    def __init__(self, folder: Path, weed: Weed, prefix: str, prompts: int = 60, endpoint: str | None = None) -> None:
        self.weed, self.url, self.endpoint = weed, weed.url(prefix), endpoint or weed.endpoint
        self.requests: list[tuple[str, str]] = []
        super().__init__(folder, prompts)

    def configure(self, **changes: Any) -> None:
        super().configure(**{"store": self.url, **changes})

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **self.weed.environment, "AWS_ENDPOINT_URL": self.endpoint}

    @property
    def store(self) -> S3Store:
        """The store, asked directly; needs `s3_environment`."""
        return S3Store(self.url, S3Settings(endpoint_url=self.weed.endpoint, wait_s=20))

    def objects(self) -> dict[str, bytes]:
        store = self.store
        return {key: store.get(key) for key in store.list() if not key.startswith(BESIDE)}
