"""The audit log of a service: entries are on its disk, and their head in etcd, before `write` returns.

Each service writes a chain of its own, with which one that comes after it goes on. What waits is written together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manylora_shared.audit.entries import BEGAN, GENESIS, MENDED, Entry, NotALine, Signer, hash_of
from manylora_shared.audit.files import SEGMENT_BYTES, ChainFile, Part, make_folder, parts_of
from manylora_shared.audit.sealing import PLAIN, EntrySeal
from manylora_shared.audit.verify import end_of
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import AuditHeadRecord
from manylora_shared.errors import ServiceUnavailable

_LOG = logging.getLogger(__name__)
_AT_ONCE = 256  # entries in one write
_KEPT_NOTES = 4_096
_RETRY_S = 1.0
_HEAD_ATTEMPTS = 4
_STOP_S = 2.0


class NotAudited(ServiceUnavailable):
    """What was to be done is not done."""


class AuditLog:
    def __init__(
        self,
        folder: Path,
        signer: Signer,
        store: Store,
        *,
        now_unix_s: Callable[[], float],
        getrandbits: Callable[[int], int],
        segment_bytes: int = SEGMENT_BYTES,
        seal: EntrySeal = PLAIN,
    ) -> None:
        self.folder = folder
        self._signer = signer
        self._store = store
        self._service = ""
        self._now_unix_s = now_unix_s
        self._getrandbits = getrandbits
        self._segment_bytes = segment_bytes
        self.seal = seal
        self._file: ChainFile | None = None
        self._seq = 0
        self._last_hash = GENESIS
        self._head_revision = 0
        self._head_seq = 0
        self._notes: deque[Entry] = deque()
        self._num_lost = 0
        self._waiting: deque[tuple[Entry, asyncio.Future[None]]] = deque()
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()
        self._are_written = False  # the last entries, whatever became of their head
        self._writing: asyncio.Task[None] | None = None

    async def start(self, service: str) -> None:
        """`service` writes. Raises OSError where the folder cannot be used; waits for the store as long as it takes."""
        self._service = service
        while True:
            try:
                await self._open()
                break
            except StoreUnavailable:
                self._close_file()
                await asyncio.sleep(_RETRY_S)
        self._writing = asyncio.create_task(self._run(), name="audit log")

    async def stop(self) -> None:
        if self._writing is not None:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._flush()
            except (OSError, TimeoutError, StoreUnavailable, NotAudited) as e:
                _LOG.error("the audit log's last entries may not be kept: %s", e)
            self._writing.cancel()
            await asyncio.wait([self._writing])
            self._writing = None
        self._close_file()

    async def failed(self) -> None:
        """Waits until the log's task ends, which only a bug makes it do."""
        assert self._writing is not None, "start comes first"
        await asyncio.shield(self._writing)

    async def write(self, entry: Entry) -> None:
        """Raises NotAudited where it is not durable, with its head; then maybe it is, and nobody may rely on it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, done))
        self._wanted.set()
        await done

    def note(self, entry: Entry) -> None:
        """To be written soon."""
        if len(self._notes) >= _KEPT_NOTES:
            self._num_lost += 1
            return
        self._notes.append(entry)
        self._wanted.set()

    # ---- the chain

    async def _open(self) -> None:
        await asyncio.to_thread(make_folder, self.folder)
        newest = await asyncio.to_thread(_newest, self.folder)
        for part in newest:
            if (file := ChainFile.take(self.folder, part.chain, self._segment_bytes)) is None:
                continue
            self._file = file
            head, revision = await self._stored_head(part.chain)
            if head is None or not await asyncio.to_thread(self._take_up, file, head):
                self._close_file()
                continue
            self._head_revision = revision
            await asyncio.to_thread(file.go_on)
            if file.torn_bytes:
                told = f"{file.torn_bytes} bytes of a line that a crash had cut are taken away"
                _LOG.warning("audit log: %s: %s", self.folder, told)
                self.note(self._own(MENDED, told))
            return
        chain = f"{self._getrandbits(64):016x}"
        self._file = ChainFile.take(self.folder, chain, self._segment_bytes)
        assert self._file is not None, "nobody else knows its name"
        await asyncio.to_thread(self._file.go_on)
        self._seq, self._last_hash, self._head_revision, self._head_seq = 0, GENESIS, 0, 0
        await self._append([self._own(BEGAN, self._signer.public_key)])

    def _take_up(self, file: ChainFile, head: AuditHeadRecord) -> bool:
        """Whether the chain ends as its head has it. Sets where it ends."""
        if head.public_key != self._signer.public_key:
            return False
        try:
            self._seq, self._last_hash = end_of(file.segments_back(), head)
        except NotALine as e:
            _LOG.critical("audit log: chain %s is not what was written, another begins: %s", head.chain, e)
            return False
        self._head_seq = head.seq
        return True

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._flush()
            except (OSError, StoreUnavailable, NotAudited) as e:
                _LOG.error("the audit log is not kept: what it has to tell waits, and acts are refused: %s", e)
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()

    async def _flush(self) -> None:
        async with self._turn:
            await self._write_all()

    async def _write_all(self) -> None:
        while self._notes or self._waiting or self._seq != self._head_seq:
            waiting = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            notes = [self._notes.popleft() for _ in range(min(_AT_ONCE, len(self._notes)))]
            if self._num_lost:
                notes.append(self._own("lost", f"{self._num_lost} entries found no room"))
            try:
                await self._append([*notes, *(entry for entry, _ in waiting)])
            except BaseException as e:
                if not self._are_written:
                    self._notes.extendleft(reversed(notes))
                self._fail(waiting, e)
                raise
            self._num_lost = 0
            for _, done in waiting:
                if not done.done():
                    done.set_result(None)

    @staticmethod
    def _fail(waiting: list[tuple[Entry, asyncio.Future[None]]], why: BaseException) -> None:
        for _, done in waiting:
            if not done.done():
                told = f"the audit log cannot be written, so nothing is done: {why}"
                done.set_exception(NotAudited(told, retry_after_s=_RETRY_S))

    async def _append(self, entries: list[Entry]) -> None:
        """Raises OSError, StoreUnavailable, NotAudited."""
        assert self._file is not None
        self._are_written = False
        if entries:
            try:
                last_hash = await asyncio.to_thread(self._write_lines, self._file, entries)
            except ServiceUnavailable as e:
                raise NotAudited(f"its entries cannot be sealed: {e.message}") from e
            self._seq, self._last_hash = self._seq + len(entries), last_hash
        self._are_written = True
        await self._tell_head()

    def _write_lines(self, file: ChainFile, entries: list[Entry]) -> str:
        """The hash of the last one. Raises OSError, ServiceUnavailable."""
        lines: list[bytes] = []
        last_hash = self._last_hash
        for seq, entry in enumerate(entries, self._seq + 1):
            told = dataclasses.replace(entry, service=self._service)
            lines.append(self._signer.line(file.chain, seq, last_hash, told, self.seal.sealed))
            last_hash = hash_of(lines[-1])
        file.append(lines)
        return last_hash

    async def _tell_head(self) -> None:
        assert self._file is not None
        for _ in range(_HEAD_ATTEMPTS):
            head = self._signer.head(self._file.chain, self._seq, self._last_hash, self._service, self._now_unix_s())
            result = await self._store.txn([Compare(head.key, self._head_revision)], [Put(head.key, head.to_json())])
            if result.succeeded:
                self._head_revision, self._head_seq = result.revision, head.seq
                return
            # An answer was lost, or etcd was brought back from a copy: it has an earlier one of ours, or none.
            found, self._head_revision = await self._stored_head(self._file.chain)
            if found is not None and (found.public_key, found.seq > head.seq) != (head.public_key, False):
                raise NotAudited(
                    "another process writes the same chain of the audit log: each needs a folder of its own"
                )
        raise NotAudited("the audit log's head cannot be written to etcd")

    async def _stored_head(self, chain: str) -> tuple[AuditHeadRecord | None, int]:
        """With its revision; none where it cannot be read."""
        stored = await self._store.get(keys.audit_head(chain))
        if stored is None:
            return None, 0
        try:
            return AuditHeadRecord.stored(stored), stored.mod_revision
        except ValueError as e:
            _LOG.error("a head of the audit log cannot be read: %s: %s", stored.key, e)
            return None, stored.mod_revision

    def _own(self, action: str, detail: str) -> Entry:
        return Entry(at_unix_s=round(self._now_unix_s(), 3), action=action, outcome="told", detail=detail)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _newest(folder: Path) -> list[Part]:
    """Chains' last segments, the one that was written last first."""
    last = {part.chain: part for part in parts_of(folder)}
    return sorted(last.values(), key=lambda part: -part.path.stat().st_mtime)


async def read_heads(store: Store) -> dict[str, AuditHeadRecord]:
    """By chain. Raises StoreUnavailable."""
    found: dict[str, Any] = {}
    for kv in (await store.list(keys.AUDIT_HEADS)).kvs:
        try:
            head = AuditHeadRecord.stored(kv)
        except ValueError as e:
            _LOG.error("a head of the audit log cannot be read: %s: %s", kv.key, e)
            chain = kv.key.removeprefix(keys.AUDIT_HEADS)
            head = AuditHeadRecord(chain, 0, "", "", 0.0, "", "")  # whose signature is not right
        found[head.chain] = head
    return found
