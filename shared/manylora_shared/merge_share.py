"""From which share of a pool's requests on an adapter is worth workers of its own, merged into their weights."""

from __future__ import annotations


def merged_workers(share: float, workers: int) -> int:
    """How many of a pool's workers one adapter's requests fill by themselves, where they are this share of the pool's.

    A worker that they did not fill would idle, for it serves nobody else. One is left for everybody.
    """
    return max(0, min(int(share * workers), workers - 1))
