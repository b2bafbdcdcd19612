"""What a host must have before servers start, each shortage in its sentence; and the server's command line."""

import resource
import shutil
import socket
import sys
from collections import namedtuple
from typing import Any

import pytest

from draftmill import memory
from draftmill.config import Config, parse
from draftmill.engines import server_record
from draftmill.engines.server_command import wanted
from draftmill.errors import UserError
from draftmill.preflight_servers import check_host, server_needs
from tests.tiny import config_values

GIB, MIB = 2**30, 2**20
Usage = namedtuple("Usage", "total used free")


def config(sglang: dict[str, Any] | None = None, **server: Any) -> Config:
    own = {"command": ["serve", "{port}"], **server}
    generate = {"engine": "sglang", "sglang": {**(sglang or {}), "server": own}}
    return parse(config_values(device="cuda", target={"model": "target", "context_length": 512}, generate=generate))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    def make(limit: str = "max", available: int = 1000 * GIB, shm: int = GIB, files: int = 10**6) -> None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "own").write_text("0::/\n")
        (tmp_path / "meminfo").write_text(f"MemAvailable: {available // 1024} kB\n")
        monkeypatch.setattr(memory, "_GROUPS", tmp_path)
        monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, shm))
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, files))

    make()
    return make


def test_as_many_servers_as_fit_the_gpus() -> None:
    assert server_needs(config(), gpus=4).servers == 4
    assert server_needs(config(gpus=2), gpus=4).servers == 2
    assert server_needs(config({"urls": ["http://elsewhere:1"]}), gpus=4).servers == 0
    assert server_needs(config(gpus=4), gpus=4).shared_memory > server_needs(config(), gpus=4).shared_memory


def test_each_row_in_flight_at_each_server_is_an_open_file(roomy: Any) -> None:
    assert server_needs(config(), gpus=4).files == 4 * 512 + 256
    urls = {"urls": ["http://elsewhere:1", "http://elsewhere:2"], "in_flight": 100}
    assert server_needs(config(urls), gpus=1).files == 2 * 100 + 256
    roomy(files=400)
    with pytest.raises(UserError, match="456 open files are needed and the limit is 400"):
        check_host(config(urls), gpus=1)


def test_a_host_with_room_passes(roomy: Any) -> None:
    check_host(config(), gpus=4)


def test_each_shortage_is_said(roomy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    roomy(limit=str(16 * GIB))
    with pytest.raises(UserError, match=r"4 SGLang servers may hold 32 GiB of host memory .* limited to 16 GiB"):
        check_host(config(), gpus=4)
    check_host(config(), gpus=1)
    roomy(available=4 * GIB)
    check_host(config(), gpus=2)
    assert "2 SGLang servers may hold 16 GiB of host memory and 4 GiB are available now" in capsys.readouterr().err
    roomy(shm=16 * MIB)
    with pytest.raises(UserError, match="/dev/shm has 16 MiB free and 4 SGLang servers need 32 MiB"):
        check_host(config(), gpus=4)
    roomy(files=600)
    with pytest.raises(UserError, match="768 open files are needed and the limit is 600"):
        check_host(config(), gpus=1)


def test_taken_ports_are_counted(roomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_record, "PORT_RANGE", 2)
    first = next(p for p in range(45000, 60000, 7) if all(map(server_record.bindable, (p, p + 100))))
    check_host(config(first_port=first), gpus=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 100))
        with pytest.raises(UserError, match=f"only 1 of the ports from {first} on are free and 2 servers"):
            check_host(config(first_port=first), gpus=2)


def test_an_interpreter_without_sglang_is_named(roomy: Any) -> None:
    with pytest.raises(UserError, match=f"SGLang is not installed for {sys.executable}"):
        check_host(config(command=None), gpus=1)
    with pytest.raises(UserError, match="/nowhere/python cannot be run"):
        check_host(config(command=None, python="/nowhere/python"), gpus=1)


def test_where_sglang_is_may_be_another_environment(roomy: Any, tmp_path: Any) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    check_host(config(command=None, environment={"PYTHONPATH": str(tmp_path)}), gpus=1)


def test_flags_are_added_replaced_and_taken_away() -> None:
    flags = {"mem-fraction-static": 0.5, "enable-metrics": False, "disable-radix-cache": False, "log-requests": True}
    command = wanted(config({"in_flight": 300}, command=None, python="py", flags=flags), "identity").command
    assert command[:3] == ("py", "-m", "sglang.launch_server")
    told = " ".join(command)
    assert "--mem-fraction-static 0.5" in told
    assert "--cuda-graph-max-bs-decode 300" in told
    assert told.endswith("--log-requests --host 127.0.0.1 --port {port}")
    assert "--enable-metrics" not in told
    assert "radix" not in told
    assert "--trust-remote-code" not in told


def test_the_keeper_is_light() -> None:
    """It stays beside a server for days: nothing heavy may be in it."""
    import subprocess

    heavy = "{'torch', 'transformers', 'pyarrow', 'aiohttp'}"
    look = f"import sys, draftmill.engines.keeper; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", look], text=True).strip() == "[]"
