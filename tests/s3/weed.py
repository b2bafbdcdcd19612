"""A real S3 service for tests: SeaweedFS on loopback, in a folder, killed at the end."""

from __future__ import annotations

from pathlib import Path

from draftmill.seaweed import ACCESS_KEY, READY_S, SECRET_KEY, Seaweed, free_ports

__all__ = ["ACCESS_KEY", "BUCKET", "READY_S", "SECRET_KEY", "Weed", "free_ports"]
BUCKET = "bucket"


class Weed(Seaweed):
    """One SeaweedFS with one bucket, on free ports. `kill` and `restart` keep ports and data."""

    def __init__(self, folder: Path, bucket: str = BUCKET) -> None:
        super().__init__(folder, bucket)
