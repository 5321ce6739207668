"""`python -m manylora_worker` as a process: its ready line, its end, and that only a model needs torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from manylora.v1 import worker_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.binary import start_etcd
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.peers import PeerTransport
from manylora_shared.errors import Code
from manylora_shared.metadata import PEER_KEY
from manylora_shared.transport.base import Channel
from manylora_shared.transport.grpc_transport import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, GrpcTransport
from manylora_sim.fake_runner import reference_tokens
from manylora_sim.peers import SIMULATED

from tests.worker.worker_fakes import EXECUTE, collect, collect_rest, message, refused

pytestmark = pytest.mark.e2e


def secret_flag(folder: Path) -> str:
    path = folder / "peer.secret"
    path.write_text(SIMULATED.metadata()[PEER_KEY])
    path.chmod(0o600)
    return f"--peer-secret-file={path}"


@contextlib.asynccontextmanager
async def fake_worker(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "manylora_sim.worker", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield process, json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_fake_worker_serves_registers_and_ends_in_order(tmp_path: Path) -> None:
    etcd = await start_etcd(tmp_path / "etcd", sync_to_disk=False)
    store = EtcdStore([etcd.endpoint])
    try:
        flags = (
            "--fake-step-ms=1",
            f"--etcd={etcd.endpoint}",
            secret_flag(tmp_path),
            "--worker-id=w0",
            "--drain-s=0.2",
        )
        async with fake_worker(*flags) as (process, ready):
            assert (ready["ready"], ready["service"], ready["id"]) == (True, "worker", "w0")
            record = await store.get(keys.worker("w0"))
            assert record is not None
            assert json.loads(record.value)["address"] == ready["address"]
            channel = PeerTransport(GrpcTransport(), SIMULATED).connect(ready["address"])
            result = await collect(channel.stream(EXECUTE, message(max_tokens=50)))
            assert result.tokens[0] == reference_tokens((5, 6, 7), None, 3, 0, 50)
            endless = channel.stream(EXECUTE, message(max_tokens=30000))
            await endless.read()
            process.send_signal(signal.SIGTERM)
            frames: list[worker_pb2.ExecuteResponse] = []
            while (frame := await endless.read()) is not None:
                frames.append(frame)
            assert frames[-1].finished.message == "the worker is shutting down"
            assert await asyncio.wait_for(process.wait(), 10) == 0
            assert await store.get(keys.worker("w0")) is None
            await channel.close()
    finally:
        await store.close()
        await etcd.stop()


async def test_what_cannot_run_ends_with_a_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for module, flags, code, said in (
            ("manylora_worker", ["--model=m", "--no-such-flag"], 2, "--no-such-flag"),
            ("manylora_sim.worker", [f"--listen={address}", secret_flag(tmp_path)], 1, address),
            ("manylora_worker", [f"--model={tmp_path}", secret_flag(tmp_path)], 1, str(tmp_path)),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *flags, stderr=asyncio.subprocess.PIPE
            )
            _, errors = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == code
            assert said in errors.decode()
            assert b"Traceback" not in errors


async def test_a_worker_imports_torch_only_to_build_its_model() -> None:
    code = (
        "import sys; from manylora_sim.worker import FakeWorkerConfig, build_fake_engine;"
        "from manylora_worker.hosting.engine import host;"
        "host(FakeWorkerConfig(), build_fake_engine); assert 'torch' not in sys.modules"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@contextlib.asynccontextmanager
async def dialled(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Channel]]:
    etcd = await start_etcd(tmp_path / "etcd", sync_to_disk=False)
    store = EtcdStore([etcd.endpoint])
    try:
        async with fake_worker(f"--etcd={etcd.endpoint}", secret_flag(tmp_path), *flags) as (process, ready):
            channel = PeerTransport(GrpcTransport(), SIMULATED).connect(ready["address"])
            yield process, channel
            await channel.close()
    finally:
        await store.close()
        await etcd.stop()


async def test_a_worker_whose_engine_hangs_ends_its_requests_and_then_itself(tmp_path: Path) -> None:
    async with dialled(tmp_path, "--fake-step-ms=1", "--fake-steps=100", "--stall-s=1") as (process, channel):
        began_s = time.monotonic()
        error = await refused(collect(channel.stream(EXECUTE, message(max_tokens=1000))))
        assert (error.code, "it has stood still for 1 s" in error.message) == (Code.UNAVAILABLE, True)
        assert await asyncio.wait_for(process.wait(), 10) == 1
        assert time.monotonic() - began_s < 10


async def test_a_worker_that_is_frozen_is_missed_within_three_seconds(tmp_path: Path) -> None:
    async with dialled(tmp_path) as (process, channel):
        stream = channel.stream(EXECUTE, message(max_tokens=30000))
        await stream.read()
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        error = await refused(collect_rest(stream))
        assert error.code is Code.UNAVAILABLE
        assert time.monotonic() - began_s < (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1e3 + 1
