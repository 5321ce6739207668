"""An S3 server of its own process (moto), which a test may stop and start again at the same port: then it is empty."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import yaml
from manylora_shared.stores.bucket import Bucket

START_S = 60.0
KEY_ID, SECRET = "store-key-id", "store-secret-access-key"


class S3Server:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"{self.endpoint}/moto-api/", timeout=5):
                    return
            except (URLError, OSError):
                assert time.monotonic() < deadline, (self.folder / "s3.log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Nobody answers at its port, and nothing is lost."""
        import os
        import signal

        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    @property
    def settings(self) -> dict[str, str]:
        return {"endpoint": self.endpoint, "region": "us-east-1", "access_key_id": KEY_ID, "secret_access_key": SECRET}

    def bucket(self, url: str) -> Bucket:
        return Bucket(url, self.settings)

    def make_bucket(self, name: str) -> None:
        from urllib.request import Request

        with urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=30):
            pass

    def access_file(self) -> Path:
        """By reference: the secrets are in files of their own."""
        for name, secret in (("id", KEY_ID), ("secret", SECRET)):
            (self.folder / name).write_text(secret)
        written = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": f"file:{self.folder / 'id'}",
            "secret_access_key": f"file:{self.folder / 'secret'}",
        }
        path = self.folder / "access.yaml"
        path.write_text(yaml.safe_dump(written))
        return path


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
