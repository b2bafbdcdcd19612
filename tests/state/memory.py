"""A store in memory."""

from __future__ import annotations

from draftmill.store.base import ObjectInfo


class Memory:
    """A store in memory with given times, for tests that need no files."""

    def __init__(self, objects: dict[str, tuple[bytes, float]] | None = None, url: str = "memory") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {key: data for key, (data, _) in (objects or {}).items()}
        self.times: dict[str, float] = {key: at for key, (_, at) in (objects or {}).items()}
        self.gets = self.parts = 0

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        return {
            key: ObjectInfo(key, len(data), self.times.get(key, 0.0))
            for key, data in self.objects.items()
            if key.startswith(prefix)
        }

    def info(self, key: str) -> ObjectInfo | None:
        return self.list(key).get(key)

    def get(self, key: str) -> bytes:
        self.gets += 1
        return self.objects[key]

    def part(self, key: str, start: int, stop: int) -> bytes:
        self.parts += 1
        return self.objects[key][start:stop]

    def put(self, key: str, data: bytes, at: float = 0.0) -> None:
        self.objects[key], self.times[key] = data, at
