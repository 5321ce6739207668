"""A constraint goes before what bars tokens."""

from __future__ import annotations

from manylora_worker.kinds.api import ANY_TOKEN
from manylora_worker.kinds.constraint import barred


def test_bars_hold_while_they_leave_a_token() -> None:
    mask = bytes([0b10010, 0b1])
    bars = [(1, ANY_TOKEN), (8, ANY_TOKEN), (3, ANY_TOKEN)]
    assert barred(mask, bars) == bytes([0b10000, 0])
    assert barred(mask, [*bars, (4, ANY_TOKEN)]) == mask
    assert barred(mask, ()) == mask
