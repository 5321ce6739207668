"""Stored policies."""

from __future__ import annotations

import asyncio

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue
from manylora_shared.coordination.policies import PolicyMirror, stored_policy
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer


def test_a_policy_is_read() -> None:
    policy = stored_policy("acme", b'tenant_id: "acme"\n')
    assert policy is not None
    assert policy.tenant_id == "acme"


@pytest.mark.parametrize(
    "document",
    [
        b"tenant_id: [",
        b'tenant_id: "acme"\nfrom_a_later_version: 1\n',
        b"tenant_id: beta\n",
        b"tenant_id: acme # \xff\n",
        b"",
    ],
)
def test_one_that_cannot_be_read_is_logged_with_its_tenant(document: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert stored_policy("acme", document) is None
    (record,) = caplog.records
    assert record.message == "a stored policy cannot be read"
    assert "acme" in str(vars(record))


@pytest.mark.parametrize("wrong", [b"tenant_id: beta\n", b"\xff\xfe", b"tenant_id: acme\nx: 1\n"])
def test_what_cannot_be_read_takes_no_policys_place_through_compaction_and_repetition(wrong: bytes) -> None:
    good = b"tenant_id: acme\nquotas: {max_output_tokens: 3}\n"

    async def main() -> None:
        server = MemoryStoreServer()
        writer, reader = server.client(), server.client()
        await writer.put(keys.tenant("acme"), good)
        mirror = PolicyMirror(reader, lambda tenant, stored: None)
        mirror.start()
        await mirror.ready()
        for _ in range(2):
            await writer.put(keys.tenant("acme"), wrong)
            await asyncio.sleep(0.1)
            assert (mirror.values["acme"].document, mirror.values["acme"].in_force) == (wrong, good)
            reader.set_reachable(False)
            await writer.put(keys.tenant("beta"), b"tenant_id: beta\n")
            server.compact()
            await asyncio.sleep(1)
            reader.set_reachable(True)
            await asyncio.sleep(1)
            assert mirror.values["acme"].in_force == good
        await writer.put(keys.tenant("acme"), b"tenant_id: acme\n")
        await asyncio.sleep(0.1)
        assert mirror.values["acme"].in_force == b"tenant_id: acme\n"
        await mirror.close()

    run(main(), seed=1)


@pytest.mark.parametrize("wrong", [b"tenant_id: beta\n", b"\xff\xfe", b"tenant_id: acme\nx: 1\n"])
def test_a_service_that_starts_finds_what_was_applied_before_a_hand_broke_it(wrong: bytes) -> None:
    good = b"tenant_id: acme\nquotas: {max_output_tokens: 3}\n"

    async def main() -> None:
        server = MemoryStoreServer()
        store = server.client()
        await store.put(keys.applied("acme"), good)
        await store.put(keys.tenant("acme"), wrong)
        await store.put(keys.tenant("other"), b"tenant_id: other\n")  # put there by hand, and right
        await store.put(keys.applied("gone"), b"tenant_id: gone\n")
        mirror = PolicyMirror(store, lambda tenant, stored: None)
        mirror.start()
        await mirror.ready()
        assert sorted(mirror.values) == ["acme", "other"]
        found = mirror.values["acme"]
        assert (found.document, found.in_force) == (wrong, good)
        assert found.problem.endswith("the one before it is in force until a policy is applied")
        assert mirror.values["other"].problem == ""
        await store.put(keys.tenant("new"), wrong)
        await store.put(keys.tenant("acme"), b"tenant_id: acme\n")
        await asyncio.sleep(0.1)
        assert mirror.values["new"].problem.endswith("requests are refused until a policy is applied")
        assert (mirror.values["acme"].in_force, mirror.values["acme"].problem) == (b"tenant_id: acme\n", "")
        await mirror.close()

    run(main(), seed=1)


def test_a_document_under_the_revision_of_another_is_read() -> None:
    """As after a store was restored from a backup."""

    async def main() -> None:
        mirror = PolicyMirror(MemoryStoreServer().client(), lambda tenant, stored: None)
        for limit in (1, 2):
            document = f"tenant_id: acme\nquotas: {{max_output_tokens: {limit}}}\n".encode()
            kv = KeyValue(keys.tenant("acme"), document, create_revision=7, mod_revision=7, version=1)
            mirror._values["acme"] = mirror._stored(kv)
            assert mirror.values["acme"].in_force == document

    run(main(), seed=1)
