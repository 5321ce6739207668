"""Blocks of KV in host memory, and the copies between them and the arena.

Owns a range of host memory and, on a GPU, the stream that copies beside the steps. memory/swapping.py decides whose a
host block is. Whole blocks are copied: earlier content is never read.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manylora_worker.weights.host_memory import HostMemory

_MEASURED_BLOCKS = 16  # copied at the start, to see how fast that is


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of stretches in which both count up by one."""
    first = 0
    for at in range(1, len(sources) + 1):
        is_over = at == len(sources)
        if is_over or sources[at] != sources[at - 1] + 1 or targets[at] != targets[at - 1] + 1:
            yield sources[first], targets[first], at - first
            first = at


class TensorHostKv:
    """See api.HostKv. arena: [blocks, elements of a block]."""

    def __init__(self, arena: Tensor, num_blocks: int) -> None:
        self._arena = arena
        self.num_blocks = num_blocks
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda and num_blocks else None
        shape = (num_blocks, arena.shape[1])
        if self._stream is None:
            self._blocks = torch.zeros(shape, dtype=arena.dtype)
        else:
            memory = HostMemory(num_blocks * arena.shape[1] * arena.itemsize)
            self._blocks = memory.allocate(num_blocks * arena.shape[1], arena.dtype).view(shape)
            # Memory that is freed while it is registered cannot be registered again; when the process ends it may be.
            weakref.finalize(self, memory.close).atexit = False
        self.block_copy_s = self._measure()  # out and in again

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> TensorCopy:
        return self._copy(self._arena, blocks, self._blocks, host_blocks)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> TensorCopy:
        return self._copy(self._blocks, host_blocks, self._arena, blocks)

    def _copy(self, source: Tensor, sources: Sequence[int], target: Tensor, targets: Sequence[int]) -> TensorCopy:
        if self._stream is None:
            started = time.perf_counter()
            for first, to, count in runs(sources, targets):
                target[to : to + count] = source[first : first + count]
            return _HostCopy(time.perf_counter() - started)
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
        with torch.cuda.stream(self._stream):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for first, to, count in runs(sources, targets):
                target[to : to + count].copy_(source[first : first + count], non_blocking=True)
            ended.record()
        return _DeviceCopy(began, ended)

    def _measure(self) -> float:
        # the first time warms up
        count = min(_MEASURED_BLOCKS, self.num_blocks, len(self._arena))
        if not count:
            return 0.0
        blocks, seconds = range(count), 0.0
        for _ in range(2):
            copies = [self.copy_out(blocks, blocks), self.copy_in(blocks, blocks)]
            for copy in copies:
                copy.wait()
            seconds = sum(copy.seconds for copy in copies)
        return seconds / count


class _HostCopy:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def is_over(self) -> bool:
        return True

    def wait(self) -> None: ...

    def go_before_steps(self) -> None: ...


class _DeviceCopy:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self._ended = ended

    @property
    def seconds(self) -> float:
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1e3

    def is_over(self) -> bool:
        is_over: bool = self._ended.query()
        return is_over

    def wait(self) -> None:
        self._ended.synchronize()

    def go_before_steps(self) -> None:
        """Steps submitted from now on come behind it. The host does not wait."""
        torch.cuda.current_stream().wait_event(self._ended)


TensorCopy = _HostCopy | _DeviceCopy
