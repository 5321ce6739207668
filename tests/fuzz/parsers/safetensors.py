"""The weight file of an adapter whose configuration is right."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.adapters import read
from tests.fuzz.harness import Harness

_MAX_DATA_BYTES = 1 << 16


def run(data: bytes) -> None:
    """A JSON header, in front of which its length is put and behind which as much data as it tells of; or a file."""
    read(weights=len(data).to_bytes(8, "little") + data + bytes(_size_of(data)) if data[:1] == b"{" else data)


def _size_of(header: bytes) -> int:
    try:
        entries: dict[str, Any] = json.loads(header)
        ends = [each["data_offsets"][1] for name, each in entries.items() if name != "__metadata__"]
        return int(min(_MAX_DATA_BYTES, max(0, *ends)))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return 0


HARNESS = Harness(run, max_bytes=8192, is_json=True)
