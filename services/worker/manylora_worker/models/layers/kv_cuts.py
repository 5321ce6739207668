"""How many keys and values no code of FP8 was large enough for, so that they were cut off: told in the log."""

from __future__ import annotations

import logging

import torch

_LOG = logging.getLogger(__name__)
_STEPS = 512  # from one look to the next


class KvCuts:
    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # who writes keys and values adds to it
        # what the device had at the last look, for no step waits until it is here
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._steps = self._told = 0

    def after_step(self) -> None:
        self._steps += 1
        if self._steps % _STEPS:
            return
        self._tell(int(self._seen))
        self._seen.copy_(self.count, non_blocking=True)

    def tell_rest(self) -> None:
        """Behind the last step, and waits for it."""
        self._tell(int(self.count))

    def _tell(self, found: int) -> None:
        if found > self._told:
            _LOG.warning(
                "KV in FP8: %d elements of keys and values were too large and are cut off at the largest code, %d in "
                "all: answers may be worse than with --kv-cache-dtype auto",
                found - self._told, found,
            )  # fmt: skip
            self._told = found
