"""A leader's metrics, recorded whenever the term's clock is saved. Owns what was counted last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manylora_shared.ids import QosClass, WorkerId
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.registry import POOL_METRICS

from manylora_scheduler.gates.neighbours import NOISY_KINDS
from manylora_scheduler.gates.overload import OverloadState
from manylora_scheduler.gates.signals import Signals
from manylora_scheduler.serving.told import Told


class TermMetrics:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._given_up: dict[tuple[QosClass, str], int] = {}  # by class and stage
        self._evicted: dict[tuple[WorkerId, str], int] = {}  # by worker and kind

    def record(self, states: Sequence[OverloadState], workers: Mapping[WorkerId, Told | None]) -> None:
        """states: of the pools. workers: what each has told; None: its stream is down."""
        telemetry = self._telemetry
        if not telemetry.has_metrics:
            return
        views = [state.view for state in states]
        telemetry.gauge(Metrics.OVERLOAD_LEVEL, max(view.level for view in views))
        overloaded = {name for view in views for name, tenant in view.tenants.items() if tenant.level > 0}
        telemetry.gauge(Metrics.OVERLOAD_TENANTS, len(overloaded))
        for qos_class in QosClass:
            told = [state.counts[qos_class].by_stage() for state in states]
            for stage in told[0]:
                total = sum(each[stage] for each in told)
                grown = total - self._given_up.get((qos_class, stage), 0)
                if grown:
                    self._given_up[qos_class, stage] = total
                    labels = {Attribute.QOS_CLASS: qos_class.value, Attribute.STAGE: stage}
                    telemetry.count(Metrics.OVERLOAD_GIVEN_UP, grown, labels)
        for kind in NOISY_KINDS:
            noisy = {noisy.tenant_id for state in states for noisy in state.noisy if noisy.kind == kind}
            telemetry.gauge(Metrics.NOISY_NEIGHBOURS, len(noisy), {Attribute.KIND: kind})
        telemetry.gauge(Metrics.CONNECTED_WORKERS, sum(told is not None for told in workers.values()))
        self._record_adapters(workers)

    def record_pools(self, pools: Mapping[str, Signals]) -> None:
        for pool, signals in pools.items():
            labels, seen = {Attribute.POOL: pool}, signals.seen
            for metric, value in (
                (Metrics.POOL_WORKERS, seen.workers),
                (Metrics.POOL_WORKERS_WANTED, signals.workers_wanted),
                (Metrics.POOL_WANTED, seen.wanted_tps),
                (Metrics.POOL_CAPACITY, signals.capacity_tps),
                (Metrics.POOL_LOAD, signals.load),
                (Metrics.POOL_PREDICTED, signals.predicted_tps),
                (Metrics.POOL_QUEUE_S, seen.queue_s),
                (Metrics.POOL_QUEUED, seen.queued),
                (Metrics.POOL_KV, seen.kv_part),
                (Metrics.POOL_ADAPTERS, seen.adapter_loads_part),
            ):
                self._telemetry.gauge(metric, value, labels)

    def close(self) -> None:
        """What is now is another's to tell."""
        for metric in (
            Metrics.OVERLOAD_LEVEL,
            Metrics.OVERLOAD_TENANTS,
            Metrics.NOISY_NEIGHBOURS,
            Metrics.CONNECTED_WORKERS,
            Metrics.UNMET_PINS,
            *POOL_METRICS,
        ):
            self._telemetry.clear(metric)

    def _record_adapters(self, workers: Mapping[WorkerId, Told | None]) -> None:
        # counts fall when the worker is another process: a new beginning, not a loss
        unmet = 0
        counted: dict[tuple[WorkerId, str], int] = {}
        for worker_id, told in workers.items():
            if told is None:
                counted |= {(worker_id, kind): self._evicted.get((worker_id, kind), 0) for kind in ("own", "displaced")}
                continue
            displaced = sum(adapters.displaced for adapters in told.adapters.values())
            evictions = sum(adapters.evictions for adapters in told.adapters.values())
            unmet += sum(not pin.on_device for adapters in told.adapters.values() for pin in adapters.pins)
            for kind, total in (("own", evictions - displaced), ("displaced", displaced)):
                before = self._evicted.get((worker_id, kind), 0)
                counted[worker_id, kind] = total
                grown = total - before if total >= before else total
                if grown:
                    self._telemetry.count(Metrics.ADAPTER_EVICTIONS, grown, {Attribute.KIND: kind})
        self._evicted = counted
        self._telemetry.gauge(Metrics.UNMET_PINS, unmet)
