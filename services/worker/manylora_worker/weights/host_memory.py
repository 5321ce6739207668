"""Pinned host memory for adapters: a device copies from it at full speed, and other processes write to it."""

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
        """Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._is_pinned:
            outcome = torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            if int(outcome) != 0:
                raise RuntimeError(f"the host tier's memory is still in use: CUDA error {int(outcome)}")


# Pinning stops the device's driver, steps in flight included (a fifth of a second for 84 MB), so HostMemory pins the
# whole host tier when the worker starts and gives out ranges of it, first fit. Descriptors are memfd: the last process
# to end frees the memory, and containers do not limit it as they do /dev/shm.
class HostMemory:
    """Used from any thread."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._slab = _Segment(self.size_bytes)
        self._free = [(0, self.size_bytes)]  # (start, end), in order; neighbours are joined
        self._taken: dict[int, int] = {}  # start -> end, in bytes
        self._apart: dict[int, _Segment] = {}  # memory outside the range, by address
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
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
                    used = start + elements * dtype.itemsize
                    self._slab.bytes[used : start + size_bytes].zero_()  # who gets the rest writes all of it
                    return self._slab.bytes[start:used].view(dtype)
        _LOG.warning("no hole of %d bytes in the host tier's memory, %d are free", size_bytes, self.free_bytes)
        segment = _Segment(size_bytes)  # no hole can hold it: memory of its own, pinned there and then
        with self._lock:
            self._apart[segment.bytes.data_ptr()] = segment
        return segment.bytes[: elements * dtype.itemsize].view(dtype)

    def offset_of(self, buffer: Tensor) -> int:
        """In bytes, in the range of `fd`; -1: it has memory of its own."""
        start = buffer.data_ptr() - self._slab.bytes.data_ptr()
        return start if start in self._taken else -1

    def fd_apart(self, buffer: Tensor) -> int:
        return self._apart[buffer.data_ptr()].fd

    def close(self) -> None:
        """Idempotent; no copy from it may be under way."""
        for segment in (self._slab, *self._apart.values()):
            segment.close()
        self._apart.clear()

    def free(self, buffer: Tensor) -> None:
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
