"""The gate against a real driver; `python tests/gpu/real_gate.py OUT_DIR` is the same with its figures kept."""

from pathlib import Path

import pytest

from draftmill.gpu.probe import probe

from .real_gate import run

READING = probe(30, only_list=True)


@pytest.mark.slow
@pytest.mark.skipif(not READING.devices, reason=f"needs an NVIDIA GPU: NVML says {READING.record.detail or 'none'}")
def test_the_gate_on_this_host(tmp_path: Path) -> None:
    failed = [step for step in run(tmp_path / "out") if not step["ok"]]
    assert failed == []
