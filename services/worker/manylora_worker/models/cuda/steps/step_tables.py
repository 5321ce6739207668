"""A step's metadata: packed on the host, copied in one transfer, read by kernels in place.

The device tensors keep their addresses for captured graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

_RING = 4


def to_device(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The host does not wait."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# A ring of pinned host buffers lets the host pack a step while the last one's copy is under way.
class StepTables:
    def __init__(self, fields: dict[str, int], device: torch.device) -> None:
        self._slices: dict[str, slice] = {}
        end = 0
        for name, length in fields.items():
            self._slices[name] = slice(end, end + length)
            end += length
        pinned = device.type == "cuda"
        self._host = [torch.zeros(end, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        self._done: list[torch.cuda.Event | None] = [None] * _RING
        self._turn = 0
        self._device = torch.zeros(end, dtype=torch.int32, device=device)

    def on_device(self, name: str) -> Tensor:
        return self._device[self._slices[name]]

    def begin(self) -> dict[str, np.ndarray]:
        """Host arrays to fill for the coming step, by field."""
        self._turn = (self._turn + 1) % _RING
        event = self._done[self._turn]
        if event is not None:
            event.synchronize()
        array = self._host[self._turn].numpy()
        return {name: array[place] for name, place in self._slices.items()}

    @contextlib.contextmanager
    def blanked(self, values: dict[str, int]) -> Iterator[None]:
        before = self._device.clone()
        self._device.zero_()
        for name, value in values.items():
            self.on_device(name).fill_(value)
        yield
        self._device.copy_(before)

    def upload(self) -> None:
        self._device.copy_(self._host[self._turn], non_blocking=True)
        if self._device.is_cuda:
            event = self._done[self._turn]
            if event is None:
                event = self._done[self._turn] = torch.cuda.Event()
            event.record()
