"""Host memory that a device copies from at full speed, taken once.

Pinning memory stops the device's driver for as long as it takes, steps in flight included: a fifth of a second for an
adapter of 84 MB. So HostMemory pins all that the host tier may hold when the worker starts, and gives out ranges of it.
First fit over free ranges that are joined again; where a hole is too small for an adapter though enough is free in all,
the adapter gets memory of its own, pinned there and then.
"""

from __future__ import annotations

import bisect
import logging
import threading

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 4096


class HostMemory:
    """One pinned range of `size_bytes`. From any thread; `close` when no copy from it is under way any more."""

    def __init__(self, size_bytes: int) -> None:
        size_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._slab = torch.zeros(size_bytes, dtype=torch.uint8)
        self._free = [(0, size_bytes)]
        """(start, end), in order, never touching one another."""
        self._taken: dict[int, int] = {}
        """Start -> end, in bytes."""
        self._lock = threading.Lock()
        self._is_pinned = torch.cuda.is_available()
        if self._is_pinned:
            outcome = torch.cuda.cudart().cudaHostRegister(self._slab.data_ptr(), size_bytes, 0)
            if int(outcome) != 0:
                raise RuntimeError(f"{size_bytes} bytes of host memory cannot be pinned: CUDA error {int(outcome)}")

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
                    return self._slab[start : start + elements * dtype.itemsize].view(dtype)
        _LOG.warning("no hole of %d bytes in the host tier's memory, %d are free", size_bytes, self.free_bytes)
        return torch.empty(elements, dtype=dtype, pin_memory=self._is_pinned)

    def close(self) -> None:
        """Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            outcome = torch.cuda.cudart().cudaHostUnregister(self._slab.data_ptr())
            if int(outcome) != 0:
                raise RuntimeError(f"the host tier's memory is still in use: CUDA error {int(outcome)}")

    def free(self, buffer: Tensor) -> None:
        """Nobody reads or copies the buffer any more."""
        start = buffer.data_ptr() - self._slab.data_ptr()
        with self._lock:
            end = self._taken.pop(start, None)
            if end is None:
                return  # memory of its own
            at = bisect.bisect_left(self._free, (start, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at > 0 and self._free[at - 1][1] == start:
                start = self._free.pop(at - 1)[0]
                at -= 1
            self._free.insert(at, (start, end))
