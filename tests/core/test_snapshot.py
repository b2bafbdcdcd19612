"""What a build saw, for its jobs: the same graph, and only for jobs of that run."""

import os

from draftmill import snapshot
from draftmill.snapshot import Seen
from tests.core.builds import make_index


def test_a_job_sees_what_its_build_saw(tmp_path):
    seen = Seen(make_index(), frozenset({"hidden/a.safetensors", "eval/b.json"}))
    snapshot.save(tmp_path, "run", seen)
    assert snapshot.load(tmp_path, "run") == seen
    assert snapshot.load(tmp_path, "another-run") is None


def test_plans_of_long_ago_are_forgotten(tmp_path):
    seen = Seen(make_index(), frozenset())
    for run in ("old", "young"):
        snapshot.save(tmp_path, run, seen)
    os.utime(tmp_path / "plans/old.json", (1, 1))
    snapshot.save(tmp_path, "new", seen)
    assert snapshot.load(tmp_path, "old") is None
    assert snapshot.load(tmp_path, "young") == seen
