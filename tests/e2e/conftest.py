"""One `manylora up` with the demo model for the whole session: two workers, real etcd, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, RequestFailed
from manylora.demo import adapter_folder

START_TIMEOUT_S = 180.0
TENANTS = """\
tenant_id: acme
---
tenant_id: birch
classes:
  batch: {weight: 1}
"""
ADAPTERS = (("acme", "upper"), ("acme", "reverse"), ("birch", "words"))


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@dataclass(frozen=True)
class UpCluster:
    """A running `manylora up`: its ready line, and where its stderr goes."""

    ready: dict[str, Any]
    stderr_path: Path
    trace_file: Path
    """Where all its processes append their spans."""

    @property
    def router(self) -> str:
        return str(self.ready["router"])

    @property
    def adapter_store(self) -> Path:
        return Path(self.ready["data"]) / "adapters"

    def pid(self, name: str) -> int:
        """Of the process that runs now, restarts included."""
        again = re.findall(rf"^{name} serves again \(pid (\d+)\)$", self.stderr_path.read_text(), re.MULTILINE)
        return int(again[-1]) if again else int(self.ready["pids"][name])

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    async def manylora(self, *arguments: str) -> Outcome:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "manylora", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "MANYLORA_SERVER": self.router, "NO_COLOR": "1"},
        )
        stdout, stderr = await process.communicate()
        return Outcome(process.returncode or 0, stdout.decode(), stderr.decode())

    async def wait_complete(self, timeout_s: float = 60.0) -> None:
        """Until the scheduler is reached and has both workers."""
        async with asyncio.timeout(timeout_s), Client(self.router, retry=None) as client:
            while True:
                try:
                    status = await client.status(timeout_s=2)
                    if status.scheduler.reachable and sum(w.connected for w in status.workers) == 2:
                        return
                except RequestFailed:
                    pass
                await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "tenants.yaml").write_text(TENANTS)
    stderr_path, trace_file = folder / "stderr", folder / "traces.jsonl"
    command = [sys.executable, "-m", "manylora", "up", "--model", "demo", "--workers", "2", "--port", "0"]
    command += ["--data", str(folder / "data"), "--tenants", str(folder / "tenants.yaml"), "--kv-cache-mb", "64"]
    env = {**os.environ, "MANYLORA_TRACE_FILE": str(trace_file), "MANYLORA_LOG_LEVEL": "debug"}
    with (
        stderr_path.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline() if readable else b""
            assert line, f"not ready:\n{stderr_path.read_text()}"
            started = UpCluster(json.loads(line), stderr_path, trace_file)
            asyncio.run(_add_adapters(started))
            yield started
            process.terminate()
            assert process.wait(30) == 0
            assert process.stdout.read() == b""
        finally:
            process.kill()
    left = [name for name, pid in started.ready["pids"].items() if Path(f"/proc/{pid}").exists()]
    assert left == []


async def _add_adapters(cluster: UpCluster) -> None:
    async with Client(cluster.router) as client:
        for tenant, adapter in ADAPTERS:
            await client.adapters.add(tenant, adapter, adapter_folder(adapter))


@pytest.fixture
async def whole(cluster: UpCluster) -> UpCluster:
    """The cluster with nothing missing."""
    await cluster.wait_complete()
    return cluster
