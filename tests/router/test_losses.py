"""What a request's losses of workers add up to."""

from __future__ import annotations

import pytest
from manylora_router.request.losses import MAX_FRUITLESS, MAX_LOSSES, Losses
from manylora_shared.errors import WorkerLost


def test_so_many_workers_may_be_lost() -> None:
    losses = Losses()
    for number in range(MAX_LOSSES):
        losses.add(WorkerLost("gone"), is_lost=True, num_tokens=number + 1)
        losses.pause("gone", number + 1, now=0.0)
    with pytest.raises(WorkerLost):
        losses.add(WorkerLost("gone"), is_lost=True, num_tokens=99)


def test_moves_count_only_where_nothing_is_drawn_between() -> None:
    losses = Losses()
    for number in range(20):
        losses.add(WorkerLost("it stops"), is_lost=False, num_tokens=number + 1)
        losses.pause("it stops", number + 1, now=0.0)
    for _ in range(MAX_FRUITLESS):
        losses.add(WorkerLost("it stops"), is_lost=False, num_tokens=20)
    with pytest.raises(WorkerLost):
        losses.add(WorkerLost("it stops"), is_lost=False, num_tokens=20)


def test_a_pause_is_from_its_first_loss_to_the_next_token() -> None:
    losses = Losses()
    losses.go_on(1.0)
    losses.pause("a", 1, now=2.0)
    losses.pause("b", 1, now=3.0)
    losses.go_on(5.0)
    losses.go_on(6.0)
    assert (losses.pauses_s, losses.why) == ([3.0], "b")
