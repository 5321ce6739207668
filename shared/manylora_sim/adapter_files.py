"""The adapter store of the simulation and of tests: folders in memory, behind AdapterFiles."""

from __future__ import annotations

from collections.abc import Callable, Collection

from manylora_shared.errors import FieldViolation, InvalidRequest, NotFound
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, digest_of
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    FILE_NAMES,
    INCOMING,
    MAX_CONFIG_BYTES,
    OBJECTS,
    WEIGHTS_NAME,
    check_chunk,
    content_hasher,
    object_path,
    parse_config,
)
from manylora_shared.stores.adapter_rope import with_rope
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer


class MemoryAdapterFiles:
    """`files` holds folders by their path; a test lays folders to import there itself."""

    def __init__(
        self,
        *,
        max_weights_bytes: int = 64 << 20,
        now_unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self._changed_unix_s: dict[str, float] = {}
        self._now_unix_s = now_unix_s
        self._limits = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: max_weights_bytes}
        self._begun = 0

    def incoming(self) -> list[str]:
        return sorted(path for path in self.files if path.startswith(INCOMING + "/"))

    async def begin(self, owner: TenantId | None = None) -> str:
        self._begun += 1
        incoming = f"{INCOMING}/{self._begun}"
        self._put(incoming, {})
        return incoming

    async def append(self, incoming: str, file_name: str, data: bytes) -> None:
        folder = self.files[incoming]
        check_chunk(file_name, data, len(folder.get(file_name, b"")), self._limits)
        self._put(incoming, {**folder, file_name: folder.get(file_name, b"") + data})

    async def import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        if store_path.startswith("/") or ".." in store_path.split("/") or "\0" in store_path:
            raise InvalidRequest.of("store_path", "is not inside the adapter store")
        source = self.files.get(store_path)
        if source is None or store_path.split("/")[0] in (INCOMING, OBJECTS):
            raise InvalidRequest.of("store_path", "cannot be read in the adapter store")
        for name in FILE_NAMES:
            if name not in source:
                raise InvalidRequest.of(name, "is missing")
        self._put(incoming, dict(source))
        return BroughtTokenizer()

    async def copy_plain(self, incoming: str, digest: AdapterDigest) -> None:
        self._put(incoming, dict(self.read(digest)))

    async def is_sealed(self, uid: AdapterUid) -> bool:
        return False

    async def put_rope(self, incoming: str, rope: str) -> None:
        folder = self.files[incoming]
        if CONFIG_NAME not in folder:
            raise InvalidRequest.of(CONFIG_NAME, "is missing")
        self._put(incoming, {**folder, CONFIG_NAME: with_rope(parse_config(folder[CONFIG_NAME]), rope)})

    async def finish(self, incoming: str) -> AdapterDigest:
        folder = self.files[incoming]
        missing = [name for name in FILE_NAMES if name not in folder]
        if missing:
            raise InvalidRequest.of_all([FieldViolation(name, "is missing") for name in missing])
        hasher = content_hasher(parse_config(folder[CONFIG_NAME]))
        hasher.update(folder[WEIGHTS_NAME])
        return AdapterDigest(hasher.hexdigest())

    async def commit(self, incoming: str, digest: AdapterDigest) -> None:
        self._put(object_path(digest), self.files[incoming])
        await self.discard(incoming)

    async def problem(self, uid: AdapterUid) -> str:
        digest = digest_of(uid)
        path = object_path(digest)
        try:
            return "" if path in self.files and await self.finish(path) == digest else "it is not what was registered"
        except InvalidRequest as e:
            return e.message

    async def discard(self, incoming: str) -> None:
        self.files.pop(incoming, None)
        self._changed_unix_s.pop(incoming, None)

    async def sweep(self, *, now_unix_s: float, older_than_s: float) -> int:
        stale = [path for path in self.incoming() if self._changed_unix_s[path] < now_unix_s - older_than_s]
        for path in stale:
            await self.discard(path)
        return len(stale)

    async def collect(self, referenced: Collection[AdapterUid], *, now_unix_s: float, older_than_s: float) -> list[str]:
        kept = {digest_of(uid) for uid in referenced}
        before_unix_s = now_unix_s - older_than_s
        objects = [path for path in self.files if path.startswith(OBJECTS + "/")]
        removed: list[str] = []
        for path in sorted(objects):
            digest = path.partition("/")[2]
            if digest not in kept and self._changed_unix_s[path] < before_unix_s:
                await self.discard(path)
                removed.append(digest)
        return removed

    def read(self, digest: AdapterDigest) -> dict[str, bytes]:
        """Raises NotFound."""
        try:
            return self.files[object_path(digest)]
        except KeyError:
            raise NotFound(f"adapter object {digest} does not exist") from None

    def _put(self, path: str, folder: dict[str, bytes]) -> None:
        self.files[path] = folder
        self._changed_unix_s[path] = self._now_unix_s()
