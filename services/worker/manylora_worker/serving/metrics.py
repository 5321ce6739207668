"""Tells of the engine's memory pressure: reads EngineView on the event loop, writes Telemetry."""

from __future__ import annotations

from manylora_shared.ids import RequestId
from manylora_shared.telemetry import Attribute, MetricName, Telemetry

from manylora_worker.hosting.view import EngineView
from manylora_worker.kinds.api import EngineRequest


class EngineMetrics:
    def __init__(self, view: EngineView, telemetry: Telemetry, block_bytes: int) -> None:
        self._view = view
        self._telemetry = telemetry
        self._block_bytes = block_bytes
        self._told = view.stats

    def request_started(self, request: EngineRequest) -> None:
        """Nothing to tell."""

    def request_ended(self, request_id: RequestId) -> None:
        """Nothing to tell."""

    def engine_changed(self) -> None:
        now, before, self._told = self._view.stats, self._told, self._view.stats
        count, out, back = self._telemetry.count, {Attribute.DIRECTION: "out"}, {Attribute.DIRECTION: "in"}
        for name, amount, attributes in (
            (MetricName.PREEMPTIONS, now.preemptions - before.preemptions, None),
            (MetricName.KV_EVICTIONS, now.evictions - before.evictions, None),
            (MetricName.KV_SWAPS, now.swaps_out - before.swaps_out, out),
            (MetricName.KV_SWAPS, now.swaps_in - before.swaps_in, back),
            (MetricName.KV_SWAPPED_BYTES, (now.blocks_out - before.blocks_out) * self._block_bytes, out),
            (MetricName.KV_SWAPPED_BYTES, (now.blocks_in - before.blocks_in) * self._block_bytes, back),
        ):
            if amount:
                count(name, amount, attributes)
        if now.host_blocks_free != before.host_blocks_free:
            used = (now.host_blocks_total - now.host_blocks_free) * self._block_bytes
            self._telemetry.gauge(MetricName.KV_HOST_BYTES, used)
