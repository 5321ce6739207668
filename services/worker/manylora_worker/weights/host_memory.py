"""Host memory that a device copies from at full speed and other processes write to, taken once.

Pinning memory stops the device's driver for as long as it takes, steps in flight included: a fifth of a second for an
adapter of 84 MB. So HostMemory pins all that the host tier may hold when the worker starts, and gives out ranges of it.
First fit over free ranges that are joined again; where a hole is too small for an adapter though enough is free in all,
the adapter gets memory of its own, pinned there and then.

All of it is in nameless files (memfd): who is handed the descriptor can map it, and nothing is left of it when the last
process that has it ends. /dev/shm would do too, but containers limit it to 64 MB.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
import threading

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 4096


class _Segment:
    """`size_bytes` of memory, pinned where there is a device."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("manylora-adapters")
        try:
            os.ftruncate(self.fd, size_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, size_bytes), dtype=torch.uint8)
            self._is_pinned = torch.cuda.is_available()
            if self._is_pinned:
                self.bytes.fill_(0)  # by all compute threads: pinning would bring the pages in one after the other
                outcome = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size_bytes, 0)
                if int(outcome) != 0:
                    raise RuntimeError(f"{size_bytes} bytes of host memory cannot be pinned: CUDA error {int(outcome)}")
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Idempotent. The memory itself goes when nobody refers to it any more."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._is_pinned:
            outcome = torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            if int(outcome) != 0:
                raise RuntimeError(f"the host tier's memory is still in use: CUDA error {int(outcome)}")


class HostMemory:
    """One pinned range of `size_bytes`. From any thread; `close` when no copy from it is under way any more."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._slab = _Segment(self.size_bytes)
        self._free = [(0, self.size_bytes)]
        """(start, end), in order, never touching one another."""
        self._taken: dict[int, int] = {}
        """Start -> end, in bytes."""
        self._apart: dict[int, _Segment] = {}
        """Memory of its own, by address."""
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """The descriptor of the range."""
        return self._slab.fd

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """[elements], to be given back to `free`."""
        size_bytes = max(1, -(-elements * dtype.itemsize // _ALIGNMENT)) * _ALIGNMENT
        with self._lock:
            for i, (start, end) in enumerate(self._free):
                if end - start >= size_bytes:
                    self._free[i : i + 1] = [(start + size_bytes, end)] if end - start > size_bytes else []
                    self._taken[start] = start + size_bytes
                    return self._slab.bytes[start : start + elements * dtype.itemsize].view(dtype)
        _LOG.warning("no hole of %d bytes in the host tier's memory, %d are free", size_bytes, self.free_bytes)
        segment = _Segment(size_bytes)
        with self._lock:
            self._apart[segment.bytes.data_ptr()] = segment
        return segment.bytes[: elements * dtype.itemsize].view(dtype)

    def offset_of(self, buffer: Tensor) -> int:
        """Where in the range of `fd` it begins, in bytes; -1: it has memory of its own, see `fd_apart`."""
        start = buffer.data_ptr() - self._slab.bytes.data_ptr()
        return start if start in self._taken else -1

    def fd_apart(self, buffer: Tensor) -> int:
        """The descriptor of the memory of its own, which it fills from the beginning."""
        return self._apart[buffer.data_ptr()].fd

    def close(self) -> None:
        """Idempotent."""
        for segment in (self._slab, *self._apart.values()):
            segment.close()
        self._apart.clear()

    def free(self, buffer: Tensor) -> None:
        """Nobody reads, writes or copies the buffer any more."""
        start = buffer.data_ptr() - self._slab.bytes.data_ptr()
        with self._lock:
            apart = self._apart.pop(buffer.data_ptr(), None)
            end = self._taken.pop(start, None)
            if end is not None:
                self._join(start, end)
        if apart is not None:
            apart.close()

    def _join(self, start: int, end: int) -> None:
        at = bisect.bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))
