"""One trace a request over all three services, read from the file that every process of the cluster appends to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from manylora.client import Client, Delta, RequestFailed, Sampling
from manylora.demo import skills
from manylora_shared.telemetry import Attribute, SpanName
from manylora_shared.telemetry.traceparent import trace_id_of

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT, ADAPTER, QOS_CLASS = "acme", "upper", "batch"
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e{:04x}-00f067aa0ba902b7-01"
EXPORT_TIMEOUT_S = 20.0
PARENTS = {
    SpanName.ADMISSION: SpanName.REQUEST,
    SpanName.QUEUE_WAIT: SpanName.REQUEST,
    SpanName.STREAM: SpanName.REQUEST,
    SpanName.STREAM_WRITE: SpanName.REQUEST,
    SpanName.QUEUE: SpanName.QUEUE_WAIT,
    SpanName.PLACEMENT: SpanName.QUEUE,
    SpanName.EXECUTE: SpanName.STREAM,
    SpanName.ADAPTER_LOAD: SpanName.EXECUTE,
    SpanName.PREFILL: SpanName.EXECUTE,
    SpanName.BATCH_BUILD: SpanName.PREFILL,
    SpanName.DECODE: SpanName.EXECUTE,
    SpanName.DECODE_QUANTUM: SpanName.DECODE,
}
SERVICES = {
    "manylora-router": {
        SpanName.REQUEST,
        SpanName.ADMISSION,
        SpanName.QUEUE_WAIT,
        SpanName.STREAM,
        SpanName.STREAM_WRITE,
    },
    "manylora-scheduler": {SpanName.QUEUE, SpanName.PLACEMENT},
    "manylora-worker": {
        SpanName.EXECUTE,
        SpanName.ADAPTER_LOAD,
        SpanName.PREFILL,
        SpanName.BATCH_BUILD,
        SpanName.DECODE,
        SpanName.DECODE_QUANTUM,
    },
}

Trace = dict[str, dict[str, Any]]
"""A trace's spans by name; each name comes once in these tests, but quanta: the last one stands."""


async def trace_of(cluster: UpCluster, traceparent: str, complete: Callable[[Trace], bool]) -> Trace:
    """The spans of a trace, once `complete` likes them: every process exports on its own time."""
    trace: Trace = {}
    try:
        async with asyncio.timeout(EXPORT_TIMEOUT_S):
            while True:
                lines = cluster.trace_file.read_text().splitlines() if cluster.trace_file.exists() else []
                spans = [span for line in lines if (span := json.loads(line))["trace_id"] == trace_id_of(traceparent)]
                trace = {span["name"]: span for span in spans}
                # the worker tells each quantum
                once = [span for span in spans if span["name"] != SpanName.DECODE_QUANTUM]
                assert len(trace.keys() - {SpanName.DECODE_QUANTUM}) == len(once), "a name came twice"
                if complete(trace):
                    return trace
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"after {EXPORT_TIMEOUT_S} s the trace has only {sorted(trace)}")


def has(*names: str) -> Callable[[Trace], bool]:
    return lambda trace: set(names) <= trace.keys()


async def test_every_phase_of_a_request_is_a_span(whole: UpCluster) -> None:
    traceparent = CALLER.format(1)
    async with Client(whole.router, tenant=TENANT) as client:
        result = await client.complete(
            skills.prompt("ab3"),
            adapter=ADAPTER,
            qos_class=QOS_CLASS,
            max_tokens=32,
            sampling=Sampling(temperature=0),
            traceparent=traceparent,
        )
    everything = {name for names in SERVICES.values() for name in names} - {SpanName.ADAPTER_LOAD}
    trace = await trace_of(whole, traceparent, has(*everything))
    for name, span in trace.items():
        assert name in SERVICES[span["service"]]
        assert span["attributes"][Attribute.TENANT_ID] == TENANT
        assert span["attributes"][Attribute.QOS_CLASS] == QOS_CLASS
        assert span["attributes"][Attribute.ADAPTER_ID] == ADAPTER
        if name != SpanName.ADMISSION:
            assert span["attributes"][Attribute.ADAPTER_VERSION] == result.adapter_version
        assert span["start_ns"] <= span["end_ns"]
        assert span["status"]["code"] != "ERROR"
        if name == SpanName.REQUEST:
            assert span["parent_id"] == traceparent.split("-")[2]
            assert span["attributes"][Attribute.REQUEST_ID] == result.request_id
        else:
            assert span["parent_id"] == trace[PARENTS[name]]["span_id"], f"{name} hangs elsewhere"
    decode, prefill = trace[SpanName.DECODE], trace[SpanName.PREFILL]
    assert prefill["end_ns"] <= decode["end_ns"]


async def test_a_cancelled_request_is_a_failed_span_in_every_service(whole: UpCluster) -> None:
    traceparent = CALLER.format(2)
    async with Client(whole.router, tenant=TENANT) as client:
        stream = client.generate("do:", adapter=ADAPTER, max_tokens=1500, ignore_eos=True, traceparent=traceparent)
        async with stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
    trace = await trace_of(whole, traceparent, has(SpanName.REQUEST, SpanName.EXECUTE))
    for name in (SpanName.REQUEST, SpanName.EXECUTE):
        assert trace[name]["status"]["code"] == "ERROR"
        assert trace[name]["attributes"][Attribute.ERROR_TYPE] == "CANCELLED"


async def test_a_refused_request_is_a_failed_span_of_the_router_alone(whole: UpCluster) -> None:
    traceparent = CALLER.format(3)
    async with Client(whole.router, tenant=TENANT) as client:
        with pytest.raises(RequestFailed, match="adapter"):
            await client.complete("do:ab3=", adapter="nowhere", traceparent=traceparent)
    trace = await trace_of(whole, traceparent, has(SpanName.REQUEST))
    assert trace[SpanName.REQUEST]["attributes"][Attribute.ERROR_TYPE] == "NOT_FOUND"
    assert {span["service"] for span in trace.values()} == {"manylora-router"}


async def test_no_span_carries_text(whole: UpCluster) -> None:
    traceparent, secret = CALLER.format(4), "zq7wv"
    async with Client(whole.router, tenant=TENANT) as client:
        await client.complete(
            skills.prompt(secret), adapter=ADAPTER, sampling=Sampling(temperature=0), traceparent=traceparent
        )
    await trace_of(whole, traceparent, has(SpanName.REQUEST, SpanName.EXECUTE))
    everything = whole.trace_file.read_text() + whole.stderr_path.read_text()
    everything += "".join(path.read_text() for path in whole.stderr_path.parent.glob("data/logs/*"))
    assert secret not in everything
    assert secret.upper() not in everything
