"""The made project with its store on a real S3 service, behind a door that counts requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.s3.counting import Door
from tests.s3.weed import Weed

_UPLOADS = 16


@dataclass(frozen=True)
class Bucket:
    """A running SeaweedFS and the door in front of it."""

    weed: Weed
    door: Door

    @property
    def environment(self) -> Mapping[str, str]:
        """How a process reaches the service, through the door."""
        return {**self.weed.environment, "AWS_ENDPOINT_URL": self.door.endpoint}

    def project(self, folder: Path, made: Path, prefix: str) -> Path:
        """A project in `folder` like the one in `made`, with the objects of its store in the bucket under a prefix."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("target", "prompts.jsonl", ".draftmill"):
            (folder / name).symlink_to(made / name)
        values = yaml.safe_load((made / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**values, "store": self.weed.url(prefix)}))
        self._upload(made / "build", prefix)
        return folder

    def _upload(self, store: Path, prefix: str) -> None:
        client = self.weed.client()

        def put(path: Path) -> None:
            key = f"{prefix}/{path.relative_to(store).as_posix()}"
            client.put_object(Bucket=self.weed.bucket, Key=key, Body=path.read_bytes())

        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(put, [path for path in store.rglob("*") if path.is_file()]))


@contextmanager
def running(folder: Path) -> Iterator[Bucket]:
    """The service, ended when left."""
    with Weed(folder) as weed, Door(weed.port) as door:
        yield Bucket(weed, door)
