"""How many prompts may come to their end in one step. Pure; asked and told by StepPlanner.

Sequences that begin to decode together end together, where they ask for equally many tokens: the services have a batch
of answers to send at once, and a batch of requests that follow them, which then begin together again. What comes
meanwhile waits for all of it. So where slots came free together, they are filled one after the other: in each step as
many prompts end as do where the slots' ends are spread evenly over a quantum. Sequences shorter than a quantum need
more than that, and a slot that waits does nothing. So there is a *credit*, in slots for a step, which grows with each
step: what slots lose by it is a small part of their time, and where it is used up all that can begin does.
"""

from __future__ import annotations

_IDLE_SHARE = 1 / 40
"""Of the slots' time so much at most is left idle."""
_MOST_CREDIT = 1
"""So many steps of all slots may have been saved up."""


class Staggering:
    """
    Args:
        num_slots: of the worker.
        quantum_tokens: of a decode quantum, at most.
    """

    def __init__(self, num_slots: int, quantum_tokens: int) -> None:
        self._num_slots = num_slots
        self._even = -(-num_slots // quantum_tokens)
        self._credit = 0.0
        """In slots for a step."""

    def holds_back(self, num_ended: int) -> bool:
        """Whether another prompt waits for the next step, where so many end in this one."""
        return num_ended >= self._even and self._credit > 0

    def planned(self, num_idle: int) -> None:
        """A step is planned. Of its free slots so many wait for prompts that were held back."""
        most = _MOST_CREDIT * self._num_slots
        self._credit = min(self._credit + _IDLE_SHARE * self._num_slots, most) - num_idle
