"""The run against a real server: what is sent when, and that a server that stands still is seen to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from manylora.load.endpoint import Endpoint
from manylora.load.planning.mix import mix_of
from manylora.load.run import UNFINISHED, Run

from tests.load.openai_server import OpenAiServer

TENANT = {"prompt_tokens": 4, "output_tokens": 2}


@asynccontextmanager
async def a_run(
    server: OpenAiServer, max_running: int = 1000, drain_s: float = 5.0, **fields: Any
) -> AsyncIterator[Run]:
    document = {"prompts": "ids", "tenants": {"a": TENANT}, **fields}
    mix = mix_of(document, lambda name: ())
    async with Endpoint(server.url, mix, {}, tls=None, timeout_s=10) as endpoint:
        await endpoint.prepare()
        yield Run(mix, endpoint, max_running=max_running, drain_s=drain_s)


async def test_all_that_is_planned_is_sent_and_counted(server: OpenAiServer) -> None:
    tenants = {"a": TENANT, "b": {**TENANT, "arrivals": {"kind": "closed", "streams": 3}}}
    async with a_run(server, tenants=tenants, arrivals={"rate": 60}, duration_s=0.7, warmup_s=0.2) as run:
        await run.run()
    total = run.total
    assert not total.errors
    assert run.running == 0
    assert total.completed == total.sent > 20
    assert total.completed < len(server.asked)  # the warm-up's do not count
    assert total.output_tokens == 2 * total.completed
    assert run.tallies["b"].running == 0
    assert run.counted_s > 0.3
    assert run.tokens == 2 * len(server.asked)


@pytest.mark.parametrize("max_running", [1000, 2])
async def test_a_stall_is_in_the_times_of_all_that_were_due_in_it(server: OpenAiServer, max_running: int) -> None:
    """Also where they could not even be sent: 50 are due in the half second, and wait a quarter in the mean."""
    server.go.clear()

    async def end_the_stall() -> None:
        await asyncio.sleep(0.5)
        server.go.set()

    constant = {"kind": "constant", "rate": 100}
    async with a_run(server, max_running, arrivals=constant, requests=50) as run:
        stall = asyncio.create_task(end_the_stall())
        await run.run()
        await stall
    ttft = run.tallies["a"].ttft
    assert ttft.count == 50
    assert ttft.mean > 0.2
    assert ttft.percentile(99) > 0.4
    assert max_running > 2 or run.late.percentile(99) > 0.3


async def test_requests_bound_closed_and_open_loops_together(server: OpenAiServer) -> None:
    closed = {"kind": "closed", "streams": 4, "think_s": 0.001}
    async with a_run(server, arrivals=closed, requests=10) as run:
        await run.run()
    assert run.tallies["a"].completed == len(server.asked) == 10
    tenants = {"a": TENANT, "b": {**TENANT, "arrivals": {"rate": 1000}}}
    async with a_run(server, tenants=tenants, arrivals=closed, requests=10) as both:
        await both.run()
    assert both.total.completed == 10
    assert min(tally.completed for tally in both.tallies.values()) > 0
    assert not run.late.count


async def test_what_does_not_end_in_time_is_unfinished(server: OpenAiServer) -> None:
    server.go.clear()
    async with a_run(server, drain_s=0.1, arrivals={"kind": "constant", "rate": 100}, requests=5) as run:
        await run.run()
        assert run.tallies["a"].errors == {UNFINISHED: 5}
        assert run.running == 0
    server.go.set()


async def test_a_stop_ends_it_at_once(server: OpenAiServer) -> None:
    server.go.clear()
    async with a_run(server, arrivals={"rate": 100}, duration_s=60) as run:
        asyncio.get_running_loop().call_later(0.2, run.stop)
        began_s = time.perf_counter()
        await run.run()
        assert time.perf_counter() - began_s < 3
        assert set(run.tallies["a"].errors) == {UNFINISHED}
    server.go.set()
