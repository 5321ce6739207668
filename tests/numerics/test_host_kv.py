"""KV blocks copied to host memory and back, on a CPU."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from manylora_worker.models.layers.host_kv import TensorHostKv, runs

_BLOCKS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20)


@given(_BLOCKS)
def test_runs_are_the_pairs_in_order_and_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    found = list(runs(sources, targets))
    assert [(a + i, b + i) for a, b, count in found for i in range(count)] == pairs
    for (a, b, count), (next_a, next_b, _) in itertools.pairwise(found):
        assert (a + count, b + count) != (next_a, next_b)


def test_blocks_come_back_as_they_left_wherever_they_go() -> None:
    arena = torch.arange(40.0).reshape(8, 5)
    before = arena.clone()
    host = TensorHostKv(arena, num_blocks=4)
    assert torch.equal(arena, before), "measuring it changed nothing"
    host.copy_out([6, 1, 2], [0, 3, 1]).wait()
    arena.zero_()
    copy = host.copy_in([3, 0, 1], [5, 4, 0])
    assert copy.is_over()
    assert torch.equal(arena[[5, 4, 0]], before[[1, 6, 2]])
    assert not arena[[1, 2, 3, 6, 7]].any()


def test_without_blocks_nothing_can_be_copied() -> None:
    host = TensorHostKv(torch.zeros(8, 5), num_blocks=0)
    assert (host.num_blocks, host.block_copy_s) == (0, 0.0)
