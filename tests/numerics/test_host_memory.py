"""HostMemory: ranges that never overlap, and that are joined again when they come back."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from manylora_worker.weights.host_memory import HostMemory

_PAGE = 4096


def test_ranges_come_and_go_in_any_order_and_nothing_is_lost() -> None:
    rng = random.Random(3)
    memory = HostMemory(64 * _PAGE)
    held: list[tuple[torch.Tensor, int]] = []
    for step in range(2000):
        if held and (rng.random() < 0.5 or memory.free_bytes < 8 * _PAGE):
            buffer, value = held.pop(rng.randrange(len(held)))
            assert bool((buffer == value).all()), "another range was written over it"
            memory.free(buffer)
        else:
            buffer = memory.allocate(rng.randrange(1, 4 * _PAGE // 2), torch.int16).fill_(step)
            held.append((buffer, step))
    for buffer, _ in held:
        memory.free(buffer)
    assert memory.free_bytes == 64 * _PAGE
    assert memory.allocate(64 * _PAGE, torch.uint8).numel() == 64 * _PAGE, "the ranges were not joined"


def test_what_fits_in_no_hole_gets_memory_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(3 * _PAGE)
    first, second, third = (memory.allocate(_PAGE, torch.uint8) for _ in range(3))
    memory.free(first)
    memory.free(third)
    with caplog.at_level(logging.WARNING):
        apart = memory.allocate(2 * _PAGE, torch.uint8)
    assert "no hole" in caplog.text
    apart.fill_(1)
    memory.free(apart)
    assert memory.free_bytes == 2 * _PAGE
    memory.free(second)
    assert memory.free_bytes == 3 * _PAGE


def hand_over(times: int, seed: int) -> None:
    """Buffers of tenants come and go, each filled with its tenant's byte; pages of a range are looked at whole."""
    rng = random.Random(seed)
    memory = HostMemory(16 * _PAGE)
    held: list[torch.Tensor] = []
    for _ in range(times):
        while len(held) > 5:
            memory.free(held.pop(rng.randrange(len(held))))
        tenant, num_bytes = rng.randrange(1, 200), rng.randrange(1, 2 * _PAGE)
        buffer = memory.allocate(num_bytes, torch.uint8).fill_(tenant)
        held.append(buffer)
        first = memory.offset_of(buffer)
        behind = memory._slab.bytes[first + num_bytes : first + -(-num_bytes // _PAGE) * _PAGE]
        assert not behind.any(), "what another tenant had there is in its page"


def test_nothing_of_another_tenant_stays_behind_an_adapter_on_the_host() -> None:
    hand_over(100_000, seed=1)


@pytest.mark.slow
def test_a_million_hand_overs_on_the_host_leave_nothing() -> None:
    hand_over(1_000_000, seed=2)
