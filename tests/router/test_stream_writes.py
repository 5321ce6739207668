"""The span of a stream's writes: how many, how long, how long the slowest."""

from __future__ import annotations

import asyncio

from manylora_router.request.stream_writes import StreamWrites
from manylora_shared.telemetry import Attribute, SpanName, Telemetry


async def write(telemetry: Telemetry, parent: str | None) -> None:
    with telemetry.span(SpanName.REQUEST, parent=parent) as request:
        writes = StreamWrites(telemetry, request)
        writes.tell({})  # nothing yet
        for seconds in (0.0, 0.02):
            writes.begin()
            await asyncio.sleep(seconds)
            writes.end()
        writes.begin()  # its reader went away
        writes.tell({Attribute.TENANT_ID: "acme"})


async def test_writes_are_one_span() -> None:
    telemetry = Telemetry.recording("router")
    await write(telemetry, None)
    span, root = telemetry.recorded()
    assert span["name"] == SpanName.STREAM_WRITE
    assert span["parent_id"] == root["span_id"]
    told = span["attributes"]
    assert (told[Attribute.TENANT_ID], told[Attribute.WRITES]) == ("acme", 2)
    assert 20 <= told[Attribute.SLOWEST_WRITE_MS] <= told[Attribute.WRITE_MS]
    assert root["start_ns"] <= span["start_ns"] <= span["end_ns"] <= root["end_ns"]


async def test_what_is_not_traced_is_not_timed() -> None:
    await write(Telemetry.disabled(), None)
    telemetry = Telemetry.recording("router")
    await write(telemetry, f"00-{'a' * 32}-{'b' * 16}-00")
    assert telemetry.recorded() == []
