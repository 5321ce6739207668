"""How long a step should take by the classes of those that run or wait. Set once; read by StepPlanner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manylora_shared.ids import QosClass


@dataclass(frozen=True)
class StepTargets:
    """In seconds, while a request of the class runs or waits; None: any time."""

    interactive: float | None = None
    standard: float | None = None
    batch: float | None = None

    def __post_init__(self) -> None:
        for qos_class in QosClass:
            target_s = self.of(qos_class)
            if target_s is not None and target_s <= 0:
                raise ValueError(f"the target of {qos_class.value} ({target_s}) must be greater than 0")

    def of(self, qos_class: QosClass) -> float | None:
        match qos_class:
            case QosClass.INTERACTIVE:
                return self.interactive
            case QosClass.STANDARD:
                return self.standard
            case QosClass.BATCH:
                return self.batch

    def among(self, classes: Collection[QosClass]) -> float | None:
        """The least of theirs."""
        return min((each for each in map(self.of, classes) if each is not None), default=None)


NO_TARGETS = StepTargets()
