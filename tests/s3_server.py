"""An S3 server of its own process (moto), which a test may stop and start again at the same port: then it is empty."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import yaml
from manylora_shared.coordination.binary import free_port
from manylora_shared.stores.bucket import Bucket

START_S = 60.0
KEY_ID, SECRET = "store-key-id", "store-secret-access-key"


class S3Server:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
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

    def forget_keys(self, after: int = 0) -> None:
        """From then on, behind `after` further calls, no key is a right one."""
        request = Request(f"{self.endpoint}/moto-api/reset-auth", data=str(after).encode(), method="POST")
        request.add_header("content-type", "text/plain")
        with urlopen(request, timeout=30):
            pass

    @property
    def settings(self) -> dict[str, str]:
        return {"endpoint": self.endpoint, "region": "us-east-1", "access_key_id": KEY_ID, "secret_access_key": SECRET}

    def bucket(self, url: str) -> Bucket:
        return Bucket(url, self.settings)

    def make_bucket(self, name: str) -> None:
        with urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=30):
            pass

    def access_file(self, endpoint: str = "") -> Path:
        """By reference: the secrets are in files of their own."""
        for name, secret in (("id", KEY_ID), ("secret", SECRET)):
            (self.folder / name).write_text(secret)
        written = {
            "endpoint": endpoint or self.endpoint,
            "region": "us-east-1",
            "access_key_id": f"file:{self.folder / 'id'}",
            "secret_access_key": f"file:{self.folder / 'secret'}",
        }
        path = self.folder / "access.yaml"
        path.write_text(yaml.safe_dump(written))
        return path


class Gate:
    """A port before a server's: `open` to it, `shut` (calls break off), or `dead` (nothing ever comes back)."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._state = "open"
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def set(self, state: str) -> None:
        """Calls under way break off."""
        with self._lock:
            self._state, ended, self._sockets = state, self._sockets, []
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.set("shut")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                with self._lock:
                    state = self._state
                    if state != "shut":
                        self._sockets.append(caller)
                if state == "shut":
                    caller.close()
                elif state == "open":
                    self._relay(caller)

    def _relay(self, caller: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))
        with self._lock:
            self._sockets.append(server)
        for pair in ((caller, server), (server, caller)):
            threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
