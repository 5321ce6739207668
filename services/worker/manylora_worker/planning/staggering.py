"""How many prompts may come to their end in one step, so that equal requests do not end together (decision 32).

Told and asked by StepPlanner. Knows numbers alone: neither sequences nor flows.
"""

from __future__ import annotations

_IDLE_SHARE = 1 / 40  # of the slots' time so much at most is left idle
_MOST_CREDIT = 1  # so many steps of all slots may have been saved up


class Staggering:
    """
    Args:
        num_slots: of the worker.
        quantum_tokens: of a decode quantum, at most.
    """

    def __init__(self, num_slots: int, quantum_tokens: int) -> None:
        self._num_slots = num_slots
        self._even = -(-num_slots // quantum_tokens)  # ends in a step where they are spread over a quantum
        self._credit = 0.0  # slots that may be idle for a step

    def holds_back(self, num_ended: int) -> bool:
        """Whether another prompt waits for the next step, where so many end in this one."""
        return num_ended >= self._even and self._credit > 0

    def planned(self, num_idle: int) -> None:
        """A step is planned. Of its free slots so many wait for prompts that were held back."""
        most = _MOST_CREDIT * self._num_slots
        self._credit = min(self._credit + _IDLE_SHARE * self._num_slots, most) - num_idle
