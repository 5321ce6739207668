"""Adapters of a bucket on a worker's disk, up to so many bytes; those used longest ago go first. The folder is all of
the state, and any number of processes may share it.
"""

#     <root>/objects/<uid>/          whole, and never changed; its time is that of its last use
#     <root>/incoming/<random>/      being written, under an exclusive lock: one without was left by a crash
#
# Whoever reads an object holds a shared lock on its folder; it goes under an exclusive one.

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from manylora_shared.errors import InvalidRequest, Overloaded
from manylora_shared.ids import AdapterUid, is_uid
from manylora_shared.stores.adapter_files import INCOMING, OBJECTS

_RETRY_S = 1.0


class DiskCache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        self._objects, self._incoming = root / OBJECTS, root / INCOMING
        self._max_bytes = max_bytes
        for folder in (self._objects, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            _remove_unheld(left)

    def has(self, uid: AdapterUid) -> bool:
        return self._folder(uid).is_dir()

    @contextmanager
    def held(self, uid: AdapterUid) -> Iterator[Path]:
        """It stays meanwhile. Raises FileNotFoundError."""
        folder = self._folder(uid)
        with _locked(folder, fcntl.LOCK_SH):
            os.utime(folder)
            yield folder

    def put(self, uid: AdapterUid, sizes: Mapping[str, int], fill: Callable[[Path], None]) -> None:
        """fill: writes files of these names and sizes into a folder; where it raises, nothing has changed.

        Raises:
            InvalidRequest: an empty cache would have no room.
            Overloaded: what is in use leaves none.
        """
        folder = self._incoming / secrets.token_hex(16)
        with _locked(self._incoming, fcntl.LOCK_EX):
            self._make_room(sum(sizes.values()))
            folder.mkdir()
            lock = _lock(folder, fcntl.LOCK_EX)
            for name, size_bytes in sizes.items():
                with (folder / name).open("wb") as file:
                    file.truncate(size_bytes)  # counts from now on
        try:
            fill(folder)
            for name in sizes:
                with (folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            os.fsync(lock)
            try:
                os.rename(folder, self._folder(uid))
            except OSError:
                if not self.has(uid):  # else another has brought the same
                    raise
            _sync(self._objects)
        finally:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)

    def drop(self, uid: AdapterUid) -> None:
        """Unless somebody reads it."""
        self._evict(self._folder(uid))

    @property
    def used_bytes(self) -> int:
        return sum(_bytes_of(folder) for parent in (self._objects, self._incoming) for folder in parent.iterdir())

    def _folder(self, uid: AdapterUid) -> Path:
        assert is_uid(uid)
        return self._objects / uid

    def _make_room(self, size_bytes: int) -> None:
        over_bytes = self.used_bytes + size_bytes - self._max_bytes
        if over_bytes <= 0:
            return
        by_age = sorted(self._objects.iterdir(), key=_last_use)
        if sum(_bytes_of(folder) for folder in by_age if not _is_held(folder)) < over_bytes:
            self._refuse(size_bytes)  # before anything goes for nothing
        for folder in by_age:
            freed_bytes = _bytes_of(folder)
            if self._evict(folder):
                over_bytes -= freed_bytes
            if over_bytes <= 0:
                return
        self._refuse(size_bytes)

    def _refuse(self, size_bytes: int) -> NoReturn:
        told = f"the disk cache of {self._max_bytes} bytes has no room for {size_bytes}"
        if size_bytes > self._max_bytes:
            raise InvalidRequest.of("adapter", f"{told}, even empty")
        raise Overloaded(f"{told} more", retry_after_s=_RETRY_S)

    def _evict(self, folder: Path) -> bool:
        try:
            with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                trash = self._incoming / secrets.token_hex(16)
                os.rename(folder, trash)
                shutil.rmtree(trash, ignore_errors=True)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True


def _lock(folder: Path, kind: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Raises FileNotFoundError, also where it went before it was locked; BlockingIOError with LOCK_NB."""
    descriptor = _lock(folder, kind)
    try:
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(descriptor)


def _is_held(folder: Path) -> bool:
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unheld(folder: Path) -> None:
    with (
        suppress(FileNotFoundError, BlockingIOError, NotADirectoryError),
        _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB),
    ):
        shutil.rmtree(folder, ignore_errors=True)


def _bytes_of(folder: Path) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def _last_use(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
