"""How many of the machine's cores a process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Of this process; all of the machine's where the system does not say which."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
