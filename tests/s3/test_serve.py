"""`draftmill serve-s3`: a real S3 service as long as a command runs, or until it is told to end."""

import os
import signal
import subprocess
import sys

import pytest

from draftmill.gpu import processes

PUT = (
    "import boto3, sys; c = boto3.client('s3'); c.put_object(Bucket='draftmill', Key='a', Body=b'1');"
    "print(c.meta.endpoint_url, c.get_object(Bucket='draftmill', Key='a')['Body'].read()); sys.exit(3)"
)


def serve(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftmill", "serve-s3", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def services(folder: str) -> list[int]:
    """Pids of services that keep their objects in a folder."""
    return [
        seen.pid for seen in processes.all_processes() if f"-dir={folder}" in (processes.command(seen.pid, 4096) or "")
    ]


@pytest.mark.slow
def test_a_command_has_the_service_by_the_usual_variables_and_its_status_is_ours(tmp_path):
    served = serve(str(tmp_path / "s3"), "--port", "0", "--", sys.executable, "-c", PUT)
    out, error = served.communicate(timeout=120)
    assert served.returncode == 3, error
    assert out.startswith("http://127.0.0.1:")
    assert "b'1'" in out
    assert services(str(tmp_path)) == []


@pytest.mark.slow
def test_the_service_ends_with_a_process_that_is_killed(tmp_path):
    served = serve(str(tmp_path / "s3"), "--port", "0", start_new_session=True)
    assert served.stdout is not None
    served.stdout.readline()
    assert len(services(str(tmp_path))) == 1
    os.kill(served.pid, signal.SIGKILL)
    served.communicate(timeout=60)
    assert processes.wait_until(lambda: services(str(tmp_path)) == [], 30)


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_end(tmp_path):
    served = serve(str(tmp_path / "s3"), "--port", "0", start_new_session=True)
    assert served.stdout is not None
    lines = [served.stdout.readline() for _ in range(8)]
    assert any(line.startswith("export AWS_ENDPOINT_URL=http://127.0.0.1:") for line in lines), lines
    assert len(services(str(tmp_path))) == 1
    os.kill(served.pid, signal.SIGINT)
    served.communicate(timeout=60)
    assert served.returncode == 0
    assert services(str(tmp_path)) == []
