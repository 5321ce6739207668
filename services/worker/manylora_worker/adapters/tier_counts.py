"""Where requests find their adapters, and how long they wait for those that are not on the device. AdapterCache writes
it.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora_worker.adapters.room import Entry


class Found(NamedTuple):
    """Cumulative, by the tier on which an adapter was when a request came for it. The names are WorkerCounters'."""

    adapters_found_device: int = 0
    adapters_found_host: int = 0
    adapters_found_disk: int = 0
    adapters_found_store: int = 0
    # until the request had all of its adapters, by the farthest: how many did, and seconds of all of them
    cold_starts_host: int = 0
    cold_starts_disk: int = 0
    cold_starts_store: int = 0
    cold_host_s: float = 0.0
    cold_disk_s: float = 0.0
    cold_store_s: float = 0.0


FARTHER = ("device", "host", "disk", "store")


class FoundCounts:
    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    @property
    def counts(self) -> Found:
        return Found(**{name: kind(self._counts.get(name, 0)) for name, kind in _KINDS.items()})

    def found(self, tier: str) -> None:
        self._add(f"adapters_found_{tier}", 1)

    def waited(self, tier: str, seconds: float) -> None:
        if tier != FARTHER[0]:
            self._add(f"cold_starts_{tier}", 1)
            self._add(f"cold_{tier}_s", seconds)

    def _add(self, name: str, more: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + more


def tier_of(entry: Entry, *, is_near: bool) -> str:
    if entry.on_device or entry.on_host:
        return "device" if entry.on_device else "host"
    return "disk" if is_near else "store"


_KINDS = {name: type(default) for name, default in Found()._asdict().items()}
