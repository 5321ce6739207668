"""The seam between loads and the readers of adapters: this process, or others (reader_pool.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from manylora_shared.encryption.sealing import OpeningKeys
from manylora_shared.ids import AdapterUid

from manylora_worker.weights.layout import Extras, HostAdapter, Layout
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterBase, AdapterLimits, read_adapter


class AdapterReader(Protocol):
    """From any thread."""

    def read(self, folder: Path, uid: AdapterUid) -> HostAdapter:
        """The memory is the caller's until `free`.

        Raises:
            AdapterInvalid: with every reason found.
            OSError, RuntimeError, ValueError, MemoryError: it could not be read now.
        """

    def check(self, folder: Path) -> tuple[Layout, Extras]:
        """Keeps nothing. Raises as `read`."""

    def free(self, adapter: HostAdapter) -> None: ...

    def close(self) -> None:
        """No call may be under way."""


class LocalReader:
    """Into unpinned memory, for a worker without a device."""

    def __init__(self, base: AdapterBase, limits: AdapterLimits, keys: OpeningKeys | None = None) -> None:
        self._base = base
        self._limits = limits
        self._keys = keys
        self._scratch = Scratch()

    def read(self, folder: Path, uid: AdapterUid) -> HostAdapter:
        return read_adapter(folder, self._base, self._limits, uid=uid, scratch=self._scratch, keys=self._keys)

    def check(self, folder: Path) -> tuple[Layout, Extras]:
        adapter = read_adapter(folder, self._base, self._limits, keys=self._keys)
        return adapter.layout, adapter.extras

    def free(self, adapter: HostAdapter) -> None:
        pass

    def close(self) -> None:
        pass
