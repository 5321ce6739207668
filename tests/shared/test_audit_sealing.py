from __future__ import annotations

import json
from pathlib import Path

import pytest
from manylora_shared.audit.entries import GENESIS, Entry, is_signed, parse
from manylora_shared.audit.files import parts_of
from manylora_shared.audit.log import AuditLog, NotAudited, read_heads
from manylora_shared.audit.sealing import EntrySeal
from manylora_shared.audit.verify import verify
from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.names import UNREADABLE, NameSeal
from manylora_shared.encryption.sealing import DataKey
from manylora_shared.errors import NotFound, ServiceUnavailable
from manylora_sim.store import MemoryStoreServer

from tests.sealing_keys import MemoryKeys
from tests.shared.audit_chains import CHAIN, SIGNER

ACT = Entry(at_unix_s=1.5, action="AdminService/AddAdapter", outcome="intent", who="k1", tenant="acme", peer="10.0.0.1")


def _log(folder: Path, keys: MemoryKeys) -> AuditLog:
    return AuditLog(
        folder,
        SIGNER,
        MemoryStoreServer().client(),
        now_unix_s=lambda: 7.0,
        getrandbits=lambda bits: 5,
        seal=EntrySeal(NameSeal(keys)),
    )


async def test_a_sealed_log_verifies_without_keys_and_shows_its_texts_with_them(tmp_path: Path) -> None:
    keys = MemoryKeys()
    log = _log(tmp_path, keys)
    await log.start("router-0")
    long = "adapter " + "planted" * 100
    for who, tenant in (("k1", "acme"), ("operator", "")):
        await log.write(Entry(at_unix_s=1.0, action="a", outcome="done", who=who, tenant=tenant, target=long))
    heads = await read_heads(log._store)
    await log.stop()
    segments = [part.read() for part in parts_of(tmp_path)]
    (report,) = verify(segments, heads, [SIGNER.public_key])
    assert (report.entries, report.problems) == (3, [])
    assert b"planted" not in segments[0].data
    lines = segments[0].data.splitlines(keepends=True)
    shown = [parse(log.seal.opened(line)[:-1]).entry.target for line in lines]
    assert shown == ["", long[:300], long[:300]]
    keys.destroy("acme")
    assert [json.loads(log.seal.opened(line))["target"] for line in lines] == ["", UNREADABLE, long[:300]]
    assert log.seal.opened(b"no line") == b"no line"


def test_where_a_tenants_key_cannot_be_had_the_clusters_is_taken() -> None:
    class Few(MemoryKeys):
        def sealing(self, owner: str) -> DataKey:
            if owner == "acme":
                raise NotFound("acme is not known")
            if owner == "globex":
                raise ServiceUnavailable("the key service is away")
            return super().sealing(owner)

    seal = EntrySeal(NameSeal(Few()))
    for tenant in ("acme", "globex"):
        entry = Entry(at_unix_s=1.0, action="a", outcome="denied", who="k", tenant=tenant, target="planted")
        line = SIGNER.line(CHAIN, 3, GENESIS, entry, seal.sealed)
        assert b"planted" not in line
        assert is_signed(parse(line[:-1]), SIGNER.public_key)
        assert parse(seal.opened(line)[:-1]).entry == entry


async def test_acts_that_cannot_be_sealed_are_refused(tmp_path: Path) -> None:
    class Away(MemoryKeys):
        def sealing(self, owner: str) -> DataKey:
            raise ServiceUnavailable(f"the key of {owner} cannot be had", retry_after_s=1.0)

    log = _log(tmp_path, Away())
    await log.start("router-0")
    with pytest.raises(NotAudited, match=f"the key of {CLUSTER}"):
        await log.write(ACT)
    await log.stop()
