"""The seam between loads and whoever reads adapters: this process, or others (reader_pool.py).

AdapterReader is used by the backend's loader threads and by the servicer's validation, several at a time. What it gives
out is read, checked and packed by source.read_adapter, wherever that runs, with the same refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from manylora_shared.ids import AdapterUid

from manylora_worker.weights.layout import HostAdapter, Layout
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterBase, AdapterLimits, read_adapter


class AdapterReader(Protocol):
    """From any thread."""

    def read(self, folder: Path, uid: AdapterUid) -> HostAdapter:
        """The adapter in `folder`, whose content must have this uid. Its memory is the caller's until `free`.

        Raises:
            AdapterInvalid: with every reason found.
            OSError, RuntimeError, ValueError, MemoryError: it could not be read now.
        """

    def check(self, folder: Path) -> Layout:
        """Reads the adapter as `read` would, whatever its uid, and keeps nothing. Raises as `read`."""

    def free(self, adapter: HostAdapter) -> None:
        """Nobody reads or copies its weights any more."""

    def close(self) -> None:
        """When no call is under way and no copy of what was read. Idempotent."""


class LocalReader:
    """Reads in the calling thread, into memory that is not pinned: for a worker without a device."""

    def __init__(self, base: AdapterBase, limits: AdapterLimits) -> None:
        self._base = base
        self._limits = limits
        self._scratch = Scratch()

    def read(self, folder: Path, uid: AdapterUid) -> HostAdapter:
        return read_adapter(folder, self._base, self._limits, expected_uid=uid, scratch=self._scratch)

    def check(self, folder: Path) -> Layout:
        return read_adapter(folder, self._base, self._limits).layout

    def free(self, adapter: HostAdapter) -> None:
        pass

    def close(self) -> None:
        pass
