"""A router under overload: what it refuses at once, what it says of it, and what callers see of a lowered output."""

from __future__ import annotations

import asyncio
import time

from manylora.v1 import common_pb2, inference_pb2, scheduler_pb2
from manylora_router.links import scheduler_client
from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, TenantId
from router_fakes import RouterCluster, ids_of, say, simulate, text_request, until

BATCH_CLOSED = scheduler_pb2.Overload(level=32, crowded=True)
ACME_CLOSED = scheduler_pb2.Overload(
    tenants=[
        scheduler_pb2.TenantOverload(
            tenant_id="acme",
            level=128,
            interactive_shares=2.0,
            standard_shares=3.0,
            batch_shares=4.0,
            limit_shares=0.0,
        )
    ]
)


def tell(cluster: RouterCluster, overload: scheduler_pb2.Overload) -> None:
    for line in cluster.scheduler._lines:
        line.outbox.put_nowait(scheduler_pb2.ScheduleResponse(overload=overload))


async def hears(cluster: RouterCluster, overload: scheduler_pb2.Overload) -> None:
    await until(lambda: cluster.app.scheduler.is_connected)
    tell(cluster, overload)
    level = max([overload.level, *(tenant.level for tenant in overload.tenants)])
    await until(lambda: cluster.app.scheduler.overload("default").level_of(TenantId("acme"), QosClass.BATCH) == level)


def test_what_the_level_excludes_is_refused_before_anything_is_done() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        answers = [await cluster.ask(text_request(), x_request_class="batch") for _ in range(8)]
        hints = []
        for answer in answers:
            assert answer.frames == []
            assert answer.error is not None
            assert (answer.error.code, answer.error.label) == (Code.RESOURCE_EXHAUSTED, "overloaded")
            assert answer.error.retry_after_s is not None
            assert "level 32 of 128" in str(answer.error)
            hints.append(answer.error.retry_after_s)
        assert len(set(hints)) == 8, "hints are spread"
        assert cluster.scheduler.enqueued == []
        assert cluster.app.calls.counters.rejected == 8
        for qos_class in ("interactive", "standard", ""):
            answer = await cluster.ask(text_request(), x_request_class=qos_class)
            assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED

    simulate(test)


def test_refusing_costs_little() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        took_ms = []
        for _ in range(50):
            began = time.perf_counter()
            answer = await cluster.ask(text_request("word " * 2000), x_request_class="batch")
            took_ms.append(1000 * (time.perf_counter() - began))
            assert answer.error is not None
        assert sorted(took_ms)[25] < 5.0, "with the client's part and both transports"

    simulate(test)


def test_a_tenant_that_gives_up_its_own_work_does_not_touch_others() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, ACME_CLOSED)
        refused = await cluster.ask(text_request(), x_request_class="interactive")
        assert refused.error is not None
        assert refused.error.label == "overloaded"
        other = await cluster.ask(text_request(), x_tenant_id="other", x_request_class="batch")
        assert other.finished.outcome == common_pb2.OUTCOME_COMPLETED

    simulate(test)


def test_the_scheduler_is_told_what_was_refused() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        for tenant in ("acme", "acme", "other"):
            await cluster.ask(text_request(), x_tenant_id=tenant, x_request_class="batch")
        await until(lambda: bool(cluster.scheduler.refused))
        (told,) = cluster.scheduler.refused
        assert {(flow.tenant_id, flow.qos_class, flow.requests) for flow in told.flows} == {
            ("acme", common_pb2.QOS_CLASS_BATCH, 2),
            ("other", common_pb2.QOS_CLASS_BATCH, 1),
        }
        assert cluster.app.scheduler.counters.refused == 3

    simulate(test)


def test_without_a_scheduler_nothing_is_given_up() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        await cluster.ask(text_request(), x_request_class="batch")
        cluster.scheduler.drop_lines()
        await until(lambda: cluster.app.scheduler.overload("default").is_quiet)
        await until(lambda: cluster.app.scheduler.is_connected)
        answer = await cluster.ask(text_request(), x_request_class="batch")
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        await asyncio.sleep(2 * scheduler_client._REFUSED_S)
        assert len(cluster.scheduler.refused) <= 1, "what was refused for one leader is not told to the next"

    simulate(test)


def test_a_refusal_by_the_scheduler_looks_the_same() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.refusal = scheduler_pb2.Refusal(
            code=int(Code.RESOURCE_EXHAUSTED), message="the cluster is overloaded", retry_after_s=2.5
        )
        answer = await cluster.ask(text_request())
        assert answer.frames == []
        assert answer.error is not None
        assert (answer.error.label, answer.error.retry_after_s) == ("overloaded", 2.5)

    simulate(test)


def test_a_lowered_output_is_told_first_and_last() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.max_output_tokens = 3
        answer = await cluster.ask(text_request(max_tokens=30), x_request_class="batch")
        expected = inference_pb2.Degraded(max_tokens=3, asked_max_tokens=30, overload_level=40)
        assert answer.frames[0].started.degraded == expected
        assert answer.finished.degraded == expected
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert [end.finish_reason for end in answer.finished.choices] == [common_pb2.FINISH_REASON_LENGTH]
        assert cluster.workers[0].executed[0].max_tokens == 3
        assert answer.text == "hel"
        assert answer.finished.usage.completion_tokens == 3
        assert cluster.scheduler.enqueued[0].max_new_tokens == 30

    simulate(test, script=say("hello world"))


def test_a_cap_that_asks_for_no_less_is_no_degradation() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.max_output_tokens = 30
        answer = await cluster.ask(text_request(max_tokens=30), x_request_class="batch")
        assert not answer.frames[0].started.HasField("degraded")
        assert not answer.finished.HasField("degraded")
        assert answer.ids_of() == ids_of("hello world")

    simulate(test)
