"""What the worker counts of memory pressure: what grew since it was told last."""

from __future__ import annotations

from dataclasses import replace

from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.adapters.cache import AdapterCacheLimits, TenantAdapters
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.counters import Setbacks, StepSeconds
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.hosting.view import EngineView
from manylora_worker.kinds.api import AdapterTier, EngineRequest, FinishReason, Sampling
from manylora_worker.kinds.sequence import GroupTimes
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.serving.metrics import MAX_ADAPTERS, MAX_TENANTS, EngineMetrics, WorkerMetrics


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
            preemptions=preemptions, blocks_out=blocks_out, host_blocks_total=9, host_blocks_free=9 - blocks_out,
            failed_steps=blocks_out - 1,
        )  # fmt: skip
        metrics.engine_changed()
    view.step_times = (StepSeconds(QosClass.INTERACTIVE, 0.25), StepSeconds(QosClass.INTERACTIVE, 0.5))
    metrics.engine_changed()
    out = frozenset({(Attribute.DIRECTION, "out")})
    interactive = frozenset({(Attribute.QOS_CLASS, "interactive")})
    assert telemetry.recorded_metrics() == {
        (Metrics.FAILED_STEPS, frozenset()): 6,
        (Metrics.PREEMPTIONS, frozenset()): 5,
        (Metrics.KV_SWAPPED_BYTES, out): 700,
        (Metrics.KV_HOST_BYTES, frozenset()): 700,
        (Metrics.STEP_SECONDS, interactive): 0.75,
    }


def test_what_is_resident_is_told_by_name_to_gateways_and_cold_starts_by_tier() -> None:
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    telemetry = Telemetry.recording("worker")
    metrics = WorkerMetrics(view, telemetry, model="base", block_bytes=100, sequence_slots=2, device_adapter_bytes=1000)

    def comes(number: int, uid: str, name: str) -> EngineRequest:
        request = EngineRequest(
            RequestId(f"r{number}"), TenantId("acme"), QosClass.BATCH, AdapterUid(uid), (1, 2), 4, Sampling()
        )
        metrics.comes(request, name)
        return request

    def told(start: str) -> list[str]:
        text = telemetry.exposition()[0].decode()
        return [line for line in text.splitlines() if line.startswith(start)]

    cold = comes(0, "u0", "legal")
    view.adapters = {AdapterUid("u0"): AdapterTier.DEVICE, AdapterUid("u1"): AdapterTier.HOST}
    view.tenant_adapters = {TenantId("acme"): TenantAdapters(device_bytes=250)}
    view.kv_blocks = {TenantId("acme"): 3, TenantId("silent"): 1}
    comes(1, "u0", "legal")
    comes(2, "u1", "sales")
    times = GroupTimes(1.0, adapter_ready_s=3.0, first_step_s=3.0, first_token_s=4.0)
    end = RequestEnd(RequestId("r0"), FinishReason.STOP, "", 1, 2, 3, 0, 0, times, 6.0)
    metrics.ended(cold, StreamEnd(EndKind.COMPLETED, "", end))
    metrics.look(0.0, 1e9)
    assert told("vllm:lora_requests_info") == [
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="legal",waiting_lora_adapters=""} 1e+09'
    ]
    view.adapters = {AdapterUid("u1"): AdapterTier.DEVICE}
    view.kv_blocks = {}
    metrics.look(1.0, 2e9)
    assert told("vllm:lora_requests_info") == [
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sales",waiting_lora_adapters=""} 2e+09'
    ]
    assert told("kv_bytes_in_use") == []
    assert told("adapter_cache_hits_total") == ['adapter_cache_hits_total{adapter="legal",tenant="acme"} 1.0']
    assert told("adapter_requests_total") == [
        f'adapter_requests_total{{tenant="acme",tier="{tier}"}} 1.0' for tier in ("disk", "device", "host")
    ]
    assert told("adapter_loads_total") == [
        'adapter_loads_total{tier="device"} 2.0',
        'adapter_loads_total{tier="host"} 1.0',
    ]
    assert told("adapter_cold_start_seconds_sum") == ['adapter_cold_start_seconds_sum{tier="disk"} 2.0']
    assert told("vllm:time_to_first_token_seconds_sum") == [
        'vllm:time_to_first_token_seconds_sum{engine="0",model_name="base"} 3.0'
    ]
    assert told("vllm:request_success_total") == [
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="base"} 1.0'
    ]


def ended_by(request: EngineRequest) -> set[str]:
    """What vllm:request_success_total says of it, run to its end; its context has 16 tokens."""
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    runner = FakeRunner(num_blocks=8, block_size=4, max_context_tokens=16)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits)
    view, telemetry = EngineView(core.stats(), 8, lambda command: None), Telemetry.recording("worker")
    metrics = WorkerMetrics(view, telemetry, model="base", block_bytes=100, sequence_slots=2, device_adapter_bytes=1000)
    core.add(request, 0.0)
    ends: list[RequestEnd] = []
    for now in range(40):
        for output in core.step(float(now)):
            if output.token_ids and output.choice == 1:
                core.stop_choice(request.request_id, 1, float(now))  # as by a stop string
        ends += core.take_ended()
    (end,) = ends
    metrics.ended(request, StreamEnd(EndKind.COMPLETED, "", end))
    lines = telemetry.exposition()[0].decode().splitlines()
    return {reason for reason in ("length", "stop") for line in lines if f'finished_reason="{reason}"' in line}


def test_a_success_is_counted_by_how_its_choices_ended() -> None:
    plain = EngineRequest(RequestId("r"), TenantId("acme"), QosClass.BATCH, None, (1, 2), 6, Sampling(seed=1))
    assert ended_by(plain) == {"length"}
    assert ended_by(replace(plain, emitted=((3, 4, 5),))) == {"length"}, "this attempt has drawn half of it"
    assert ended_by(replace(plain, max_tokens=60)) == {"length"}, "the context is full"
    assert ended_by(replace(plain, n=2)) == {"length"}, "one of its choices was"
    stops = frozenset(range(1 << 16))
    assert ended_by(replace(plain, stop_token_ids=stops)) == {"stop"}
    assert ended_by(replace(plain, stop_token_ids=stops, max_tokens=1)) == {"stop"}, "as many as it may have"


def test_a_composition_counts_each_of_its_parts_and_waits_for_the_farthest() -> None:
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view, telemetry = EngineView(core.stats(), 8, lambda command: None), Telemetry.recording("worker")
    options = {"model": "base", "block_bytes": 100, "sequence_slots": 2, "device_adapter_bytes": 1000}
    metrics = WorkerMetrics(view, telemetry, is_near=lambda uid: uid == "disk", **options)  # type: ignore[arg-type]
    view.adapters = {AdapterUid("device"): AdapterTier.DEVICE}
    key = key_of(Part(AdapterUid(uid)) for uid in ("device", "disk", "far"))
    request = EngineRequest(RequestId("r"), TenantId("acme"), QosClass.BATCH, key, (1, 2), 4, Sampling())
    metrics.comes(request, "device+disk+far")
    times = GroupTimes(1.0, adapter_ready_s=3.0, first_step_s=3.0, first_token_s=4.0)
    end = RequestEnd(RequestId("r"), FinishReason.STOP, "", 1, 2, 3, 0, 0, times, 6.0)
    metrics.ended(request, StreamEnd(EndKind.COMPLETED, "", end))
    lines = telemetry.exposition()[0].decode().splitlines()
    for tier in ("device", "disk", "store"):
        assert f'adapter_requests_total{{tenant="acme",tier="{tier}"}} 1.0' in lines
    assert 'adapter_cold_start_seconds_sum{tier="store"} 2.0' in lines


def test_ten_thousand_tenants_with_an_adapter_each_have_bounded_series() -> None:
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    telemetry = Telemetry.recording("worker")
    metrics = WorkerMetrics(view, telemetry, model="base", block_bytes=100, sequence_slots=2, device_adapter_bytes=1000)
    most = 0
    for number in range(12_000):
        tenant, uid = TenantId(f"t{number % 10_000}"), AdapterUid(f"u{number % 10_000}")
        request = EngineRequest(RequestId(f"r{number}"), tenant, QosClass.BATCH, uid, (1, 2), 4, Sampling())
        view.adapters = {uid: AdapterTier(2 + number % 2), AdapterUid(f"u{number % 7}"): AdapterTier.DEVICE}
        view.kv_blocks = {tenant: 3, TenantId(f"t{number % 7}"): 1}
        view.setbacks = {tenant: Setbacks(preemptions=number + 1)}
        metrics.comes(request, f"a{number % 10_000}")
        times = GroupTimes(1.0, adapter_ready_s=3.0, first_step_s=3.0, first_token_s=4.0)
        end = RequestEnd(request.request_id, FinishReason.STOP, "", 1, 2, 3, 0, 0, times, 6.0)
        metrics.ended(request, StreamEnd(EndKind.COMPLETED, "", end))
        metrics.left(request)
        if number % 100 == 99:
            metrics.look(float(number), 1e9)
        if number % 3_000 == 2_999:
            most = max(most, sum(not line.startswith("#") for line in telemetry.exposition()[0].decode().splitlines()))
    by_tenant = (
        len((Metrics.KV_IN_USE, Metrics.KV_TENANT_EVICTIONS, Metrics.TENANT_PREEMPTIONS)) + 3
    )  # tiers of requests
    assert most < 400 + by_tenant * (MAX_TENANTS + 1) + MAX_ADAPTERS + 1
    text = telemetry.exposition()[0].decode()
    assert 'preemptions_total{tenant="other"}' in text
    assert 'adapter_cache_hits_total{adapter="other",tenant="other"}' in text
