"""What a worker's spans and metrics tell of requests."""

from __future__ import annotations

import asyncio

import pytest
from manylora_shared.telemetry import Attribute, Metrics, SpanName, Telemetry
from manylora_worker.engine.counters import Setbacks

from tests.worker.worker_fakes import (
    MODEL,
    UID,
    Scheduler,
    collect,
    config,
    eventually,
    make_engine,
    message,
    running_worker,
)

PHASES = {SpanName.PREFILL, SpanName.BATCH_BUILD, SpanName.DECODE, SpanName.DECODE_QUANTUM}


@pytest.mark.parametrize("threaded", [False, True])
async def test_swaps_are_counted_and_stand_in_the_spans_of_their_requests(threaded: bool) -> None:
    """Six requests want four blocks each of eight."""
    telemetry = Telemetry.recording("worker")
    settings = config(num_blocks=8, sequence_slots=3, host_kv_mb=16 * 2**18 / 2**20, prefix_cache_share=0.0)
    engine = make_engine(settings, threaded=threaded, step_s=0.001 if threaded else 0.0)  # they meet
    async with running_worker(telemetry=telemetry, settings=settings, engine=engine) as worker:
        calls = [worker.execute(message(f"r{i}", tenant_id="ab"[i % 2], max_tokens=58)) for i in range(6)]
        results = await asyncio.gather(*(collect(call) for call in calls))
        await eventually(lambda: not worker.engine.runtime.view.running)
        stats = worker.engine.core.stats()
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
    assert set(scheduler.setbacks) == {"a", "b"}
    for name in Setbacks._fields:
        assert sum(getattr(each, name) for each in scheduler.setbacks.values()) == getattr(stats, name), name
    assert stats.swaps_out > 0
    assert stats.swaps_in == stats.swaps_out
    assert sum(result.finished.swaps for result in results) == stats.swaps_out
    assert sum(result.finished.evictions for result in results) == stats.evictions
    metrics = telemetry.recorded_metrics()
    out, back = (frozenset({(Attribute.DIRECTION, direction)}) for direction in ("out", "in"))
    assert metrics[Metrics.KV_SWAPS, out] == metrics[Metrics.KV_SWAPS, back] == stats.swaps_out
    assert metrics[Metrics.KV_SWAPPED_BYTES, out] == stats.blocks_out * MODEL.kv_block_bytes
    assert metrics[Metrics.KV_SWAPPED_BYTES, back] == stats.blocks_in * MODEL.kv_block_bytes
    assert metrics[Metrics.KV_HOST_BYTES, frozenset()] == 0
    assert metrics[Metrics.PREEMPTIONS, frozenset()] == stats.preemptions
    assert metrics.get((Metrics.KV_EVICTIONS, frozenset()), 0) == stats.evictions
    spans = [s["attributes"] for s in telemetry.recorded() if s["name"] == SpanName.EXECUTE]
    assert sum(span[Attribute.KV_SWAPPED] for span in spans) == stats.swaps_out
    assert sum(span[Attribute.KV_EVICTED] for span in spans) == stats.evictions


async def test_the_spans_of_a_request() -> None:
    telemetry = Telemetry.recording("worker")
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with running_worker(telemetry=telemetry, load_s=0.02) as worker:
        metadata = {"traceparent": parent, "x-adapter-id": "upper", "x-tenant-id": "acme"}
        await collect(worker.execute(message(adapter_uid=UID), metadata=metadata))
        await collect(worker.execute(message("base")))
    spans = telemetry.recorded()
    mine = {s["name"]: s for s in spans if s["attributes"][Attribute.REQUEST_ID] == "r1"}
    assert set(mine) == {SpanName.EXECUTE, SpanName.ADAPTER_LOAD, *PHASES}
    for span in mine.values():
        assert span["trace_id"] == "1" * 32
        assert span["attributes"][Attribute.TENANT_ID] == "acme"
        assert span["attributes"][Attribute.QOS_CLASS] == "standard"
        assert span["attributes"][Attribute.ADAPTER_ID] == "upper"
        assert span["attributes"][Attribute.ADAPTER_VERSION] == UID
    assert mine[SpanName.EXECUTE]["parent_id"] == "2" * 16
    assert mine[SpanName.EXECUTE]["attributes"][Attribute.OUTPUT_TOKENS] == 8
    assert mine[SpanName.DECODE]["parent_id"] == mine[SpanName.EXECUTE]["span_id"]
    base = {s["name"] for s in spans if s["attributes"][Attribute.REQUEST_ID] == "base"}
    assert base == {SpanName.EXECUTE, *PHASES}
    assert mine[SpanName.BATCH_BUILD]["parent_id"] == mine[SpanName.PREFILL]["span_id"]
    assert mine[SpanName.BATCH_BUILD]["attributes"][Attribute.BATCH_ROWS] == 1
    assert mine[SpanName.DECODE_QUANTUM]["parent_id"] == mine[SpanName.DECODE]["span_id"]


async def test_a_decode_has_a_span_for_each_quantum() -> None:
    telemetry = Telemetry.recording("worker")
    settings = config(num_blocks=64)
    async with running_worker(telemetry=telemetry, settings=settings, engine=make_engine(settings, step_s=0.001)) as w:
        await collect(w.execute(message("long", max_tokens=58)))
    (decode,) = (s for s in telemetry.recorded() if s["name"] == SpanName.DECODE)
    quanta = [s for s in telemetry.recorded() if s["name"] == SpanName.DECODE_QUANTUM]
    assert 1 < len(quanta) <= 4
    assert all(each["parent_id"] == decode["span_id"] for each in quanta)
    starts = [decode["start_ns"], *(each["end_ns"] for each in quanta)]
    assert starts == [*(each["start_ns"] for each in quanta), decode["end_ns"]]


async def test_what_is_not_sampled_has_no_span(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry.recording("worker")
    async with running_worker(telemetry=telemetry) as worker:
        await collect(worker.execute(message(), metadata={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}))
    assert telemetry.recorded() == []


async def test_a_failed_requests_line_has_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry.recording("worker")
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with running_worker(telemetry=telemetry, error_of=lambda uid, tier: "it is torn") as worker:
        await collect(worker.execute(message(adapter_uid=f"{UID}@acme"), metadata={"traceparent": parent}))
    (line,) = (each for each in caplog.records if each.getMessage() == "a request failed")
    told = getattr(line, "manylora_fields")  # noqa: B009
    assert (told["trace_id"], told["adapter_version"]) == ("1" * 32, UID)
