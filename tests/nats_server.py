"""A NATS server of a test's own, with JetStream on its disk: the binary that pip brings."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from manylora_shared.coordination.binary import free_port

PASSWORD = "nats-5ecret-of-the-test"


class NatsServer:
    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.url = f"nats://manylora:{PASSWORD}@127.0.0.1:{self._port}"
        (folder / "server.conf").write_text(
            f"port: {self._port}\nhost: 127.0.0.1\njetstream: {{store_dir: {folder}/store, sync_interval: always}}\n"
            f"authorization: {{user: manylora, password: {PASSWORD}}}\n"
        )
        self._command = [str(Path(sys.executable).with_name("nats-server")), "-c", str(folder / "server.conf")]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
