"""What a router tells the audit log, over its ports."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_router.guard.rules import RPCS
from manylora_shared.audit.entries import Entry, parse
from manylora_shared.audit.files import parts_of
from manylora_shared.audit.log import read_heads
from manylora_shared.audit.verify import verify
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from manylora_shared.tenancy.roles import Role
from router_fakes import ADMIN, KeyedChannel, audited_cluster, until

from tests.router.test_admin_versions import add_two
from tests.router.test_rules import METHODS


def entries(folder: Path) -> list[Entry]:
    return [parse(line).entry for part in parts_of(folder) for line in part.read().data.splitlines()]


async def call(channel: KeyedChannel, rpc: str, **fields: Any) -> Any:
    method = ADMIN[rpc]
    if method.client_streaming:
        stream = channel.stream(method)
        await stream.write(method.request_type(header=admin_pb2.AddAdapterHeader(**fields)))
        await stream.close_send()
        return await stream.read()
    if method.server_streaming:
        stream = channel.stream(method, method.request_type(**fields))
        return [each async for each in _all(stream)]
    return await channel.call(method, method.request_type(**fields))


async def _all(stream: Any) -> Any:
    while (answer := await stream.read()) is not None:
        yield answer


async def test_every_act_is_in_the_log_before_it_is_done_and_the_log_is_whole(tmp_path: Path) -> None:
    async with audited_cluster(tmp_path) as cluster:
        ask = cluster.client
        policy = "tenant_id: new\n"
        applied = await call(ask, "ApplyTenant", policy_yaml=policy)
        await call(ask, "ApplyTenant", policy_yaml=policy + "quotas: {concurrency: 2}\n")
        await call(ask, "ApplyTenant", policy_yaml=policy, validate_only=True)
        made = await call(ask, "CreateKey", tenant_id="new", role="generate")
        rotated = await call(ask, "RotateKey", key_id=made.info.key_id)
        await call(ask, "RevokeKey", key_id=rotated.info.key_id)
        await call(ask, "PutSamples", tenant_id="new", name="s", samples=b'{"prompt": "a", "expected": "b"}\n')
        await call(ask, "RemoveSamples", tenant_id="new", name="s")
        name = {"tenant_id": "acme", "name": "lower"}
        await add_two(cluster)
        for rpc, fields in (
            ("RolloutAdapter", {"to": 2, "percent": 10}),
            ("PromoteAdapter", {}),
            ("PromoteAdapter", {}),
            ("RollbackAdapter", {}),
            ("RetireAdapter", {"number": 2}),
            ("ReadAdapter", {}),
            ("RemoveAdapter", {}),
        ):
            await call(ask, rpc, **name, **fields)
        await call(ask, "LiftQuarantine", tenant_id="new")
        await call(ask, "DropWorkerCaches", worker_id="worker-0", prefixes=True)
        await call(ask, "Drain", id="worker-0")
        await call(ask, "DeleteTenant", tenant_id="new")
        await until(lambda: [e.outcome for e in entries(tmp_path)].count("done") >= 19, within_s=5.0)
        told = entries(tmp_path)
        acts = [e.action.rpartition("/")[2] for e in told if e.outcome == "intent"]
        assert acts == [
            "ApplyTenant",
            "ApplyTenant",
            "CreateKey",
            "RotateKey",
            "RotateKey",
            "RevokeKey",
            "PutSamples",
            "RemoveSamples",
            "AddAdapter",
            "AddAdapter",
            "RolloutAdapter",
            "PromoteAdapter",
            "RollbackAdapter",
            "RetireAdapter",
            "ReadAdapter",
            "RemoveAdapter",
            "LiftQuarantine",
            "DropWorkerCaches",
            "Drain",
            "DeleteTenant",
        ]
        assert [e.outcome for e in told].count("done") == 19
        sealing = {"RotateEncryption", "SealStores", "ExportTexts", "EraseTexts"}  # of routers with --encryption alone
        assert set(acts) | sealing == {name.rpartition("/")[2] for name, rule in RPCS.items() if rule.is_act}
        first, second = [e for e in told if e.outcome == "intent"][:2]
        assert first.target == "tenant new"
        assert (first.before, first.after) == ("", hashlib.sha256(applied.policy_yaml.encode()).hexdigest())
        assert second.before == first.after != second.after
        assert (first.may, first.tenant, first.service) == ("gateway,operator", "", "router-0")
        assert made.key.rpartition("-")[2] not in str(told)
        heads = await read_heads(cluster.store)
        (report,) = verify([part.read() for part in parts_of(tmp_path)], heads)
        assert (report.problems, report.unfinished) == ([], 0)


def test_the_calls_that_are_acts() -> None:
    """A call whose name says that it changes something is one."""
    reads = ("Get", "List", "Verify", "Check", "Generate", "GiveFeedback", "ReadAudit", "Resume")
    names = {name.rpartition("/")[2] for name in METHODS if not name.rpartition("/")[2].startswith(reads)}
    assert names == {name.rpartition("/")[2] for name, rule in RPCS.items() if rule.is_act}


async def test_while_the_log_cannot_be_written_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    async with audited_cluster(tmp_path) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr("manylora_shared.audit.files.os.write", full)
            for rpc, fields in (
                ("ApplyTenant", {"policy_yaml": "tenant_id: new\n"}),
                ("CreateKey", {"role": "viewer"}),
                ("RemoveAdapter", {"tenant_id": "acme", "name": "upper"}),
                ("DeleteTenant", {"tenant_id": "acme"}),
                ("Drain", {"id": "router-0"}),
            ):
                with pytest.raises(RpcError) as error:
                    await call(cluster.client, rpc, **fields)
                assert error.value.code is Code.UNAVAILABLE
                assert "the audit log cannot be written, so nothing is done" in error.value.message
                assert "No space left" in error.value.message
            assert (await call(cluster.client, "GetStatus")).routers, "what changes nothing is answered"
        assert await cluster.store.get(keys.tenant("new")) is None
        assert await cluster.store.get(keys.tenant("acme")) is not None
        assert await cluster.store.get(keys.adapter("acme", "upper")) is not None
        assert len((await cluster.store.list(keys.API_KEYS)).kvs) == 1
        await call(cluster.client, "ApplyTenant", policy_yaml="tenant_id: new\n")


async def test_refused_calls_are_told_and_floods_of_them_counted(tmp_path: Path) -> None:
    async with audited_cluster(tmp_path) as cluster:
        admin = cluster.caller(await cluster.put_role(Role.TENANT_ADMIN))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)

        async def refused(channel: KeyedChannel, rpc: str, **fields: Any) -> Code:
            with pytest.raises(RpcError) as error:
                await call(channel, rpc, **fields)
            return error.value.code

        assert await refused(admin, "DeleteTenant", tenant_id="other") is Code.PERMISSION_DENIED
        assert await refused(admin, "RemoveAdapter", tenant_id="other", name="secret") is Code.PERMISSION_DENIED
        for _ in range(100):
            await refused(admin, "ListTenants")
        for _ in range(50):
            assert await refused(cluster.caller("x"), "ListKeys") is Code.UNAUTHENTICATED
        cluster.app._acts.tell_counts(is_last=True)
        await until(lambda: any(e.action == "counted" for e in entries(tmp_path)))
        told = [e for e in entries(tmp_path) if e.outcome == "denied"]
        assert [(e.action, e.target) for e in told[:2]] == [
            ("AdminService/DeleteTenant", "tenant other"),
            ("AdminService/RemoveAdapter", "tenant other"),
        ]
        assert (told[0].tenant, told[0].may, told[0].peer) == ("acme", "admin", "memory:client")
        assert len(told) == 17, "sixteen of them, and a count"
        assert told[-1].action == "counted"
        assert told[-1].detail.startswith("136 more refused calls in ")
