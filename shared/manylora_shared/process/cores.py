"""Sets of processor cores by their numbers, as `taskset` writes them, and which of them a process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Set as AbstractSet

_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cores(text: str) -> frozenset[int]:
    """`0-2,5` as {0, 1, 2, 5}; empty: none. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is no core and no range of cores such as 0-3")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cores)


def format_cores(cores: AbstractSet[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def usable_cores() -> frozenset[int]:
    """Those that this process may use; without a scheduler that says so, all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def keep_to(cores: AbstractSet[int]) -> None:
    """This thread, and threads and processes that it begins from now on, use these alone.

    Raises:
        OSError: none of them can be used, or the system has no such thing.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise OSError("this system keeps no process to some cores")
    os.sched_setaffinity(0, cores)
