"""What came of a run of the model of overload, and what is read off it.

Goodput counts tokens, prompt and output, of requests that ended within their caller's patience. All is counted from the
scenario's `measured_from_s` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_scheduler.core.request import FlowKey
from manylora_shared.ids import QosClass, TenantId

from bench.overload_scenario import Scenario


def _by_class() -> dict[QosClass, int]:
    return dict.fromkeys(QosClass, 0)


@dataclass
class Result:
    offered: dict[QosClass, int] = field(default_factory=_by_class)
    completed: dict[QosClass, int] = field(default_factory=_by_class)
    refused: dict[QosClass, int] = field(default_factory=_by_class)
    expired: dict[QosClass, int] = field(default_factory=_by_class)
    capped: int = 0
    good_tokens: int = 0
    ttft_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    ttft_flows: dict[FlowKey, list[float]] = field(default_factory=dict)
    waits_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    levels: list[tuple[float, int]] = field(default_factory=list)
    refused_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    offered_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    at_rest_s: float | None = None
    """After the load fell back: when nothing was given up any more."""
    busy_part: float = 0.0
    """Of all slots' steps."""


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def ttft_of_small(scenario: Scenario, result: Result) -> list[float]:
    """Interactive requests' times to first token, in seconds, but for the large tenant's: it is above its share."""
    large = TenantId("tenant-0") if scenario.large else None
    return [
        ttft_s
        for flow, ttfts_s in result.ttft_flows.items()
        if flow.qos_class is QosClass.INTERACTIVE and flow.tenant_id != large
        for ttft_s in ttfts_s
    ]


def work_of(scenario: Scenario, result: Result) -> float:
    """What was completed, as a part of what all slots can do: tokens would compare one class's with another's."""
    steps = sum(result.completed[q] * scenario.mix[q].slot_steps() for q in QosClass)
    seconds = scenario.until_s - scenario.measured_from_s
    return steps * scenario.step_s / (seconds * scenario.slots * scenario.workers)
