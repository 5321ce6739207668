"""From which share of the requests on an adapter fills a worker."""

from __future__ import annotations

import pytest
from manylora_shared.merge_share import merged_workers


@pytest.mark.parametrize(
    ("share", "workers", "own"),
    [(0.24, 4, 0), (0.25, 4, 1), (0.55, 4, 2), (1.0, 4, 3), (1.0, 1, 0), (0.0, 4, 0), (0.5, 0, 0)],
)
def test_it_fills_so_many_and_one_is_everybodys(share: float, workers: int, own: int) -> None:
    assert merged_workers(share, workers) == own
