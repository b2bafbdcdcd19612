"""How fast shards go to S3 and come back, through the storage plugin and by boto3 alone, on the same files and server.

    python -m benchmarks.transfer [--files 8] [--mib 32] [--repeat 5]

SeaweedFS runs on this machine. The two ways take turns, each time with new bytes under new keys; rates are medians, and
the ratio is the median of the rounds' ratios. boto3 moves one file after another with `upload_file` and `download_file`,
each in parts by ten threads. The plugin is driven as Snakemake drives it: outputs one after another, the inputs of a job
together.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snakemake_storage_plugin_s3lean import StorageProvider, StorageProviderSettings
from tests.s3.weed import ACCESS_KEY, SECRET_KEY, Weed

WANTED = 0.8


@dataclass
class Bench:
    weed: Weed
    folder: Path
    files: int
    size: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def make(self, prefix: str) -> list[str]:
        """New files under the place that the plugin keeps for them."""
        keys = [f"{prefix}/{number}" for number in range(self.files)]
        for key in keys:
            path = self.place(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(self.size))
        return keys

    def place(self, key: str) -> Path:
        return self.folder / self.weed.bucket / key

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            self.place(key).unlink()

    def alone(self) -> None:
        """One round by boto3."""
        client, bucket = self.client(), self.weed.bucket
        keys = self.make(f"boto3-{self.rounds}")
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)  # opens the connection, as planning has done for the plugin
        with self.timed("upload boto3"):
            for key in keys:
                client.upload_file(str(self.place(key)), bucket, key)
        self.drop(keys)
        with self.timed("download boto3"):
            for key in keys:
                client.download_file(bucket, key, str(self.place(key)))
        self.end(keys)

    def plugin(self) -> None:
        """One round through the plugin."""
        keys = self.make(f"plugin-{self.rounds}")
        provider = self.provider()
        things = [provider.object(f"s3://{self.weed.bucket}/{key}") for key in keys]
        provider.list(self.weed.bucket, keys[0].partition("/")[0] + "/")
        with self.timed("upload plugin"):
            asyncio.run(in_turn([thing.managed_store for thing in things]))
        self.drop(keys)
        # What a later run knows of the objects is what it has listed.
        provider.known.clear()
        provider.own.clear()
        provider.listed.clear()
        provider.list(self.weed.bucket, keys[0].partition("/")[0] + "/")
        things = [provider.object(f"s3://{self.weed.bucket}/{key}") for key in keys]
        with self.timed("download plugin"):
            asyncio.run(together([thing.managed_retrieve for thing in things]))
        self.end(keys)

    def end(self, keys: list[str]) -> None:
        self.drop(keys)
        for key in keys:
            self.client().delete_object(Bucket=self.weed.bucket, Key=key)

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.weed.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def provider(self) -> StorageProvider:
        settings = StorageProviderSettings(
            endpoint_url=self.weed.endpoint, access_key=ACCESS_KEY, secret_key=SECRET_KEY, wait_s=60.0
        )
        return StorageProvider(local_prefix=self.folder, logger=logging.getLogger("transfer"), settings=settings)


async def in_turn(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        await call()


async def together(calls: list[Callable[[], Any]]) -> None:
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(call())


def report(bench: Bench) -> bool:
    total = bench.files * bench.size / 2**20
    print(f"{bench.files} files of {bench.size / 2**20:g} MiB, {bench.rounds} rounds, medians")
    good = True
    for way in ("upload", "download"):
        boto3, plugin = (bench.seconds[f"{way} {name}"] for name in ("boto3", "plugin"))
        # The two of one round met the same machine, busy or not.
        ratio = statistics.median(theirs / ours for theirs, ours in zip(boto3, plugin, strict=True))
        good &= ratio >= WANTED
        print(
            f"  {way:8}  boto3 {total / statistics.median(boto3):6.1f} MiB/s   "
            f"plugin {total / statistics.median(plugin):6.1f} MiB/s   ratio {ratio:.2f} (at least {WANTED})"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Transfer rates through the plugin and by boto3 alone.")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--mib", type=float, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder, Weed(Path(folder) / "weed") as weed:
        bench = Bench(weed, Path(folder) / "files", arguments.files, int(arguments.mib * 2**20))
        for number in range(arguments.repeat):
            # Who goes first changes, so that neither always meets the other's leftovers.
            for way in (bench.alone, bench.plugin) if number % 2 else (bench.plugin, bench.alone):
                way()
            bench.rounds += 1
        return 0 if report(bench) else 1


if __name__ == "__main__":
    raise SystemExit(main())
