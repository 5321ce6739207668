"""What the worker counts of memory pressure: what grew since it was told last."""

from __future__ import annotations

from manylora_shared.telemetry import Attribute, MetricName, Telemetry
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.hosting.view import EngineView
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.serving.metrics import EngineMetrics


def test_counts_grow_by_what_is_new_and_bytes_are_of_whole_blocks() -> None:
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    telemetry = Telemetry.recording("worker")
    metrics = EngineMetrics(view, telemetry, block_bytes=100)
    metrics.engine_changed()
    assert telemetry.recorded_metrics() == {}, "nothing has happened"
    for preemptions, blocks_out in ((3, 2), (5, 2), (5, 7)):
        view.stats = view.stats._replace(
            preemptions=preemptions, blocks_out=blocks_out, host_blocks_total=9, host_blocks_free=9 - blocks_out
        )
        metrics.engine_changed()
    out = frozenset({(Attribute.DIRECTION, "out")})
    assert telemetry.recorded_metrics() == {
        (MetricName.PREEMPTIONS, frozenset()): 5,
        (MetricName.KV_SWAPPED_BYTES, out): 700,
        (MetricName.KV_HOST_BYTES, frozenset()): 700,
    }
