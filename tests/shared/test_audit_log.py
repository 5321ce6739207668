"""The audit log on a disk: what is written stays, and what cannot be written is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manylora_shared.audit import files
from manylora_shared.audit.entries import MENDED, Entry, Signer, parse
from manylora_shared.audit.files import parts_of
from manylora_shared.audit.log import AuditLog, NotAudited, read_heads
from manylora_shared.audit.verify import ChainReport, verify
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_sim.store import MemoryStoreServer

from tests.shared.audit_chains import OTHER, SIGNER

RNG = random.Random(5)


def act(number: int) -> Entry:
    return Entry(at_unix_s=float(number), action="AdminService/ApplyTenant", outcome="intent", request=f"r{number}")


def log_of(folder: Path, store: Store, *, signer: Signer = SIGNER, segment_bytes: int = 1 << 20) -> AuditLog:
    return AuditLog(
        folder,
        signer,
        store,
        now_unix_s=lambda: 7.0,
        getrandbits=RNG.getrandbits,
        segment_bytes=segment_bytes,
    )


@contextlib.asynccontextmanager
async def running(log: AuditLog) -> AsyncIterator[AuditLog]:
    await log.start("router-0")
    try:
        yield log
    finally:
        await log.stop()


async def verified(folder: Path, store: Store) -> list[ChainReport]:
    heads = await read_heads(store)
    return verify([part.read() for part in parts_of(folder)], heads, [SIGNER.public_key])


def entries(folder: Path) -> list[Entry]:
    return [parse(line).entry for part in parts_of(folder) for line in part.read().data.splitlines()]


async def test_what_is_written_is_there_and_a_next_service_goes_on(tmp_path: Path) -> None:
    store = MemoryStoreServer().client()
    folder = tmp_path / "audit"
    for start in (0, 50):
        async with running(log_of(folder, store, segment_bytes=2_000)) as log:
            await asyncio.gather(*(log.write(act(start + i)) for i in range(50)))
            log.note(Entry(at_unix_s=1.0, action="a", outcome="done"))
    (report,) = await verified(folder, store)
    assert (report.problems, report.entries, report.behind_head, report.torn_bytes) == ([], 103, 0, 0)
    assert len(parts_of(folder)) > 2, "segments are changed by size"
    assert [e.request for e in entries(folder) if e.outcome == "intent"] == [f"r{i}" for i in range(100)]
    assert {e.service for e in entries(folder)} == {"router-0"}
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.stat(parts_of(folder)[0].path).st_mode & 0o077 == 0


async def test_two_services_with_one_folder_write_a_chain_each(tmp_path: Path) -> None:
    store = MemoryStoreServer().client()
    async with running(log_of(tmp_path, store)) as one, running(log_of(tmp_path, store)) as other:
        await asyncio.gather(*(log.write(act(i)) for i in range(20) for log in (one, other)))
    reports = await verified(tmp_path, store)
    assert [(r.problems, r.entries) for r in reports] == [([], 21)] * 2


async def test_a_torn_tail_is_mended_and_told(tmp_path: Path) -> None:
    store = MemoryStoreServer().client()
    async with running(log_of(tmp_path, store)) as log:
        await log.write(act(1))
    (part,) = parts_of(tmp_path)
    with part.path.open("ab") as file:
        file.write(b'{"action":"Admin')
    (before,) = await verified(tmp_path, store)
    assert (before.torn_bytes, before.problems) == (16, [])
    async with running(log_of(tmp_path, store)) as log:
        await log.write(act(2))
    (report,) = await verified(tmp_path, store)
    assert (report.torn_bytes, report.problems) == (0, [])
    told = [e for e in entries(tmp_path) if e.action == MENDED]
    assert [e.detail for e in told] == ["16 bytes of a line that a crash had cut are taken away"]


@pytest.mark.parametrize("how", ["cut", "change", "lose", "key", "head"])
async def test_a_log_that_is_not_what_was_written_is_not_gone_on_with(tmp_path: Path, how: str) -> None:
    store = MemoryStoreServer().client()
    async with running(log_of(tmp_path, store)) as log:
        for i in range(5):
            await log.write(act(i))
    (part,) = parts_of(tmp_path)
    data = part.path.read_bytes()
    if how == "cut":
        part.path.write_bytes(data[:-20])
    elif how == "change":
        part.path.write_bytes(data.replace(b'"r4"', b'"r5"'))
    elif how == "lose":
        part.path.unlink()
    elif how == "head":
        await store.delete(keys.audit_head(part.chain))
    async with running(log_of(tmp_path, store, signer=OTHER if how == "key" else SIGNER)) as log:
        await log.write(act(9))
    heads = await read_heads(store)
    found = {r.chain: r for r in verify([p.read() for p in parts_of(tmp_path)], heads)}
    assert len(found) == 2, "another chain was begun"
    assert bool(found.pop(part.chain).problems) == (how != "key"), "the first one stays for whoever looks into it"
    (after,) = found.values()
    assert (after.problems, after.entries) == ([], 2)


async def test_what_cannot_be_written_is_refused_and_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryStoreServer()
    store = server.client()
    write = os.write

    def half(file: int, data: memoryview) -> int:
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    async with running(log_of(tmp_path, store)) as log:
        await log.write(act(1))
        monkeypatch.setattr(files.os, "write", half)
        with pytest.raises(NotAudited, match=r"nothing is done: .*No space left"):
            await log.write(act(2))
        log.note(Entry(at_unix_s=1.0, action="kept", outcome="done"))
        monkeypatch.undo()
        await log.write(act(3))
        server.set_up(False)
        with pytest.raises(NotAudited):
            await log.write(act(4))
        server.set_up(True)
        await log.write(act(5))
    (report,) = await verified(tmp_path, store)
    assert report.problems == []
    told = [e.request or e.action for e in entries(tmp_path)]
    assert [each for each in told if each != "r4"] == ["began", "r1", "kept", "r3", "r5"]


async def test_notes_have_a_bound_and_what_is_lost_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_shared.audit.log._KEPT_NOTES", 10)
    store = MemoryStoreServer().client()
    async with running(log_of(tmp_path, store)) as log:
        for i in range(30):
            log.note(act(i))
        await log.write(act(99))
    assert [e.detail for e in entries(tmp_path) if e.action == "lost"] == ["20 entries found no room"]
    assert len(entries(tmp_path)) == 13


async def test_a_head_that_etcd_lost_is_written_again(tmp_path: Path) -> None:
    store = MemoryStoreServer().client()
    async with running(log_of(tmp_path, store)) as log:
        await log.write(act(1))
        (head,) = (await read_heads(store)).values()
        await store.delete(head.key)
        await log.write(act(2))
        await store.put(head.key, head.to_json())  # brought back from an earlier copy
        await log.write(act(3))
        theirs = SIGNER.head(head.chain, 99, "f" * 64, "router-1", 8.0)
        await store.put(head.key, theirs.to_json())
        with pytest.raises(NotAudited, match="another process writes the same chain"):
            await log.write(act(4))
        await store.put(head.key, head.to_json())
    assert [r.problems for r in await verified(tmp_path, store)] == [[]]


async def test_a_head_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    store = MemoryStoreServer().client()
    await store.put(keys.audit_head("f" * 16), b"{")
    (report,) = await verified(tmp_path, store)
    assert report.problems[0] == "head: its signature is not right"
