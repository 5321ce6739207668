"""`python -m manylora_router` as a process: its ready line, its refusal of open listeners, its end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from manylora.v1 import admin_pb2, inference_pb2
from manylora_router.config import RouterConfig
from manylora_shared.coordination import keys
from manylora_shared.coordination.binary import start_etcd
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.errors import Code, RpcError
from manylora_shared.process.config import ConfigError, parse
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.grpc_transport import GrpcTransport
from router_fakes import ADMIN, GENERATE, FakeWorker, read_all, say


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--insecure"], "--insecure"),
        (["--listen=nowhere"], "--listen"),
        (["--default-max-tokens=0"], "--default-max-tokens"),
        (["--lease-ttl-s=1"], "--lease-ttl-s"),
        (["--max-adapter-mb=0"], "--max-adapter-mb"),
        (["--adapter-store="], "--adapter-store"),
        (["--speed=9"], "--speed"),
    ],
)
def test_settings_that_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(RouterConfig, ["--adapter-store=/x", *flags], {})


@pytest.mark.e2e
async def test_router_process(tmp_path: Path) -> None:
    etcd = await start_etcd(tmp_path / "etcd")
    store = EtcdStore([etcd.endpoint])
    transport = GrpcTransport()
    worker = FakeWorker("worker-0", say("x"))
    server = await transport.serve("127.0.0.1:0", [worker.service()])
    await store.put(keys.worker("worker-0"), worker.record(server.address).to_json())
    key_file = tmp_path / "keys" / "operator.key"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "manylora_router",
        f"--etcd={etcd.endpoint}",
        f"--adapter-store={tmp_path / 'adapters'}",
        "--router-id=router-7",
        f"--peer-secret-file={tmp_path / 'keys' / 'peer.secret'}",
        f"--operator-key-file={key_file}",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert ready == {"ready": True, "service": "router", "id": "router-7", "address": ready["address"]}
        assert key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text().strip()
        credentials = bearer(key)
        channel = transport.connect(ready["address"])
        with pytest.raises(RpcError) as error:
            await channel.call(ADMIN["GetStatus"], admin_pb2.GetStatusRequest())
        assert error.value.code is Code.UNAUTHENTICATED
        apply = ADMIN["ApplyTenant"]
        await channel.call(apply, admin_pb2.ApplyTenantRequest(policy_yaml="tenant_id: acme"), metadata=credentials)
        status = admin_pb2.GetStatusResponse()
        async with asyncio.timeout(60):
            for _ in range(250):
                status = await channel.call(ADMIN["GetStatus"], admin_pb2.GetStatusRequest(), metadata=credentials)
                if status.routers:
                    break
                await asyncio.sleep(0.02)  # its own record comes back to it by a watch
        assert [(r.router_id, r.address) for r in status.routers] == [("router-7", ready["address"])]
        assert [w.worker_id for w in status.workers] == ["worker-0"]
        stream = channel.stream(
            GENERATE,
            inference_pb2.GenerateRequest(text="hi"),
            metadata={"x-tenant-id": "acme", **credentials},
            timeout=10,
        )
        with pytest.raises(RpcError) as error:
            await stream.read()
        assert error.value.code is Code.FAILED_PRECONDITION
        waiting = channel.stream(
            GENERATE,
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5])),
            metadata={"x-tenant-id": "acme", **credentials},
            timeout=0.5,
        )
        answer = await read_all(waiting)
        assert answer.error is not None
        assert answer.error.code is Code.DEADLINE_EXCEEDED
        await channel.close()
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, stderr.decode()
        assert await store.get(keys.router("router-7")) is None
        await store.close()
        await server.stop(0.0)
        await etcd.stop()
    assert "Traceback" not in stderr.decode()
    assert key not in stderr.decode()
    assert key.rpartition("-")[2] not in stderr.decode()
