"""Tenants' documents of the simulation and of tests, in memory, beside MemoryAdapterFiles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from manylora_shared.errors import NotFound
from manylora_shared.ids import AdapterUid, digest_of
from manylora_shared.stores.documents import Document

from manylora_sim.adapter_files import MemoryAdapterFiles


class MemoryDocuments:
    def __init__(self, files: MemoryAdapterFiles, *, now_unix_s: Callable[[], float] = lambda: 0.0) -> None:
        self.kept: dict[str, tuple[bytes, float]] = {}
        self._files = files
        self._now_unix_s = now_unix_s

    async def put(self, path: str, data: bytes) -> None:
        self.kept[path] = data, self._now_unix_s()

    async def get(self, path: str) -> bytes:
        if path not in self.kept:
            raise NotFound(f"{path.rpartition('/')[2]}: there is none")
        return self.kept[path][0]

    async def seal(self, path: str) -> bool:
        return False

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        found: list[Document] = []
        for path, (data, changed_unix_s) in sorted(self.kept.items()):
            _, tenant, its_kind, name = path.split("/")
            if tenant_id in ("", tenant) and kind in ("", its_kind):
                found.append(Document(tenant, its_kind, name, len(data), changed_unix_s))
        return found

    async def delete(self, path: str) -> None:
        self.kept.pop(path, None)

    async def adapter(self, uid: AdapterUid) -> AsyncIterator[tuple[str, bytes]]:
        for name, data in self._files.read(digest_of(uid)).items():
            yield name, data
