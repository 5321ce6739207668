"""Files of the adapter store as they are read and written: sealed or plain, whichever they are."""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import Any

from manylora_shared.encryption.sealing import MAGIC, SALT_BYTES, DataKey, OpeningKeys, SealedFile, Sealer


class StoredFile(io.BufferedReader):
    """A file's content. plain_bytes: how long it is."""

    def __init__(self, raw: io.RawIOBase, plain_bytes: int) -> None:
        super().__init__(raw)
        self.plain_bytes = plain_bytes
        self._content = raw

    def fill(self, target: Any) -> bool:
        """Reads the whole content anew, past what was buffered. Whether it is just as long as `target`."""
        view = memoryview(target).cast("B")
        self._content.seek(0)
        while view:
            count = self._content.readinto(view)
            if not count:
                return False
            view = view[count:]
        return not self._content.read(1)


def stored_file(descriptor: int, name: str, keys: OpeningKeys) -> StoredFile:
    """Takes the descriptor. Raises OSError, SealBroken, Sealed, ServiceUnavailable."""
    file = io.FileIO(descriptor, "rb")
    try:
        is_sealed = os.pread(descriptor, len(MAGIC), 0) == MAGIC
        if not is_sealed:
            return StoredFile(file, os.fstat(descriptor).st_size)
        sealed = SealedFile(file, name, keys)
        return StoredFile(sealed, sealed.plain_bytes)
    except BaseException:
        file.close()
        raise


class FileSealer:
    """Seals into a new file what is added to it. One thread at a time."""

    def __init__(self, path: Path, key: DataKey) -> None:
        self._file = path.open("xb")
        self._sealer = Sealer(self._file.write, path.name, key, secrets.token_bytes(SALT_BYTES))

    @property
    def plain_bytes(self) -> int:
        return self._sealer.plain_bytes

    def add(self, data: bytes) -> None:
        self._sealer.add(data)

    def end(self) -> None:
        self._sealer.end()
        self._file.close()

    def discard(self) -> None:
        self._file.close()


class FolderSealer:
    """Of files that are written side by side, as an adapter's are while it is added."""

    def __init__(self, key: DataKey) -> None:
        self.key = key
        self.files: dict[str, FileSealer] = {}

    def file(self, path: Path) -> FileSealer:
        if path.name not in self.files:
            self.files[path.name] = FileSealer(path, self.key)
        return self.files[path.name]

    def end(self) -> None:
        for file in self.files.values():
            file.end()

    def discard(self) -> None:
        for file in self.files.values():
            file.discard()
