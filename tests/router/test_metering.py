"""What stands in the ledger of requests that end in each way. That rows, settlements and answers agree is looked at
behind every test of the router (router_fakes.check_ledger), and in the simulation (books.check_ledger)."""

from __future__ import annotations

import asyncio
from typing import Any

from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code, ServiceUnavailable
from manylora_shared.ledger.row import UsageRow
from manylora_shared.tenancy.identity import bearer, split_key
from router_fakes import RouterCluster, finished, say, simulate, text_request, tokens, until

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def only_row(cluster: RouterCluster) -> UsageRow:
    (row,) = cluster.ledger.rows.values()
    return row


def test_a_completed_request() -> None:
    async def test(cluster: RouterCluster) -> None:
        key = await cluster.put_key(tenant="acme")
        parts = split_key(key)
        assert parts is not None
        more = {"x_adapter_id": "upper", "x_request_class": "batch", "traceparent": TRACE}
        await until(lambda: parts[0] in cluster.app.directory.api_keys)
        answer = await cluster.ask(text_request("abcd"), **more, **bearer(key))
        row = only_row(cluster)
        assert (row.tenant, row.key, row.qos_class, row.pool) == ("acme", parts[0], "batch", "default")
        assert (row.adapter, row.adapter_version, row.adapter_digest) == ("upper", "1", "a" * 64)
        assert (row.outcome, row.degraded, row.router, row.worker[:7]) == ("completed", False, "router-0", "worker-")
        assert row.trace_id == TRACE[3:35]
        usage = answer.finished.usage
        told = usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens
        assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == told == (4, 2, len(answer.ids_of()))
        assert row.duration_ms >= row.ttft_ms > row.queue_ms == 1.5
        assert row.ended_unix_s >= row.began_unix_s > 0
        assert (row.unread_tokens, row.resumes, row.adapter_loads) == (0, 0, 1)

    simulate(test, script=say("hello world", cached_prompt_tokens=2))


def test_a_worker_tells_what_it_held() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> Any:
        yield worker_pb2.ExecuteResponse(
            frame=0, started=worker_pb2.ExecuteStarted(adapter=worker_pb2.ADAPTER_TIER_DEVICE)
        )
        yield tokens(1, 0, [5, 6], finish=common_pb2.FINISH_REASON_LENGTH)
        end = finished(2)
        end.finished.kv_byte_seconds, end.finished.adapter_byte_seconds = 1234.4, 99.6
        yield end

    async def test(cluster: RouterCluster) -> None:
        await cluster.ask(text_request("abcd"), x_adapter_id="upper")
        row = only_row(cluster)
        assert (row.kv_byte_seconds, row.adapter_byte_seconds, row.adapter_loads) == (1234, 100, 0)

    simulate(test, script=script)


def test_one_that_was_left_is_charged_what_its_worker_computed() -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.word = worker_pb2.ExecuteFinished(
                outcome=common_pb2.OUTCOME_WORKER_LOST, prompt_tokens=4, output_tokens=9, kv_byte_seconds=7.0
            )
        stream = cluster.open(text_request("abcd", max_tokens=200))
        while True:
            frame = await stream.read()
            assert frame is not None
            if frame.HasField("delta"):
                break
        stream.cancel()
        await cluster.at_rest()
        row = only_row(cluster)
        assert row.outcome == "cancelled"
        assert (row.prompt_tokens, row.completion_tokens + row.unread_tokens, row.kv_byte_seconds) == (4, 9, 7)
        assert 0 < row.completion_tokens < 9

    simulate(test, script=say("a long answer that nobody reads", per_frame=2, pause_s=0.05))


def test_one_that_was_refused_has_no_row_and_one_that_waited_has_one() -> None:
    async def test(cluster: RouterCluster) -> None:
        refused = await cluster.ask(text_request("abcd"), x_adapter_id="none")
        assert refused.error is not None
        assert not cluster.ledger.rows
        cluster.scheduler.holds = True
        stream = cluster.open(text_request("abcd", max_tokens=200))
        await asyncio.sleep(1.0)
        stream.cancel()
        await cluster.at_rest()
        row = only_row(cluster)
        assert (row.outcome, row.settled_tokens, row.worker) == ("cancelled", 0, "")

    simulate(test)


def test_without_room_for_a_row_nothing_is_begun() -> None:
    async def test(cluster: RouterCluster) -> None:
        def full() -> None:
            raise ServiceUnavailable("no room", retry_after_s=1.0)

        cluster.app.calls.rows.check_room = full  # type: ignore[method-assign]
        answer = await cluster.ask(text_request("abcd"))
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE
        assert not cluster.ledger.rows
        assert not cluster.scheduler.settled

    simulate(test)
