"""Breakers, quarantine and service levels through the router: what callers see, and what the status tells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from manylora.v1 import admin_pb2, common_pb2, scheduler_pb2, worker_pb2
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.guard.circuits import ADAPTER_THRESHOLD, MIN_OPEN_S
from manylora_router.links.moments import MOMENT_S
from manylora_router.metrics import RECORD_S
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.clock import FakeClock
from manylora_sim.documents import MemoryDocuments
from manylora_sim.fake_text import FakeText
from manylora_sim.peers import SIMULATED
from router_fakes import (
    ADMIN,
    GENERATE,
    STARTED,
    Answer,
    KeyedChannel,
    RouterCluster,
    finished,
    ids_of,
    read_all,
    say,
    simulate,
    text_request,
    tokens,
    until,
)

SLO = """classes:
  interactive: {weight: 4, slo: {ttft_p95_ms: 100, availability: 0.75}}
"""


async def no_adapter(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    """Adapters cannot be loaded; the base model answers."""
    if not request.adapter_uid:
        async for response in say("fine")(request):
            yield response
        return
    yield STARTED
    yield finished(1, common_pb2.OUTCOME_ADAPTER_FAILED, "the files are gone")


async def no_store(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    yield STARTED
    yield finished(1, common_pb2.OUTCOME_ADAPTER_UNAVAILABLE, "the bucket cannot be used now")


def set_scripts(cluster: RouterCluster, script: Any) -> None:
    for worker in cluster.workers:
        worker.script = script


async def status_of(channel: Any, **fields: Any) -> admin_pb2.GetStatusResponse:
    await asyncio.sleep(2 * MOMENT_S)  # an earlier answer stands for a moment, here and at the other routers
    answer: admin_pb2.GetStatusResponse = await channel.call(
        ADMIN["GetStatus"], admin_pb2.GetStatusRequest(**fields), timeout=10
    )
    return answer


async def lost(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    """The worker dies after the first frame."""
    yield STARTED
    raise RpcError(Code.UNAVAILABLE, "connection reset")


async def lift(channel: Any, tenant_id: str) -> admin_pb2.LiftQuarantineResponse:
    answer: admin_pb2.LiftQuarantineResponse = await channel.call(
        ADMIN["LiftQuarantine"], admin_pb2.LiftQuarantineRequest(tenant_id=tenant_id), timeout=10
    )
    return answer


def error_of(answer: Answer) -> tuple[Code, str]:
    assert answer.error is not None
    return answer.error.code, answer.error.label


async def circuits_told(cluster: RouterCluster) -> dict[str, float]:
    """What the metrics say of circuits, half-open ones apart; by the time that this is asked it may have changed."""
    guard, loop = cluster.app.calls.guard, asyncio.get_running_loop()
    cluster.app.calls.metrics.refusing(guard.circuits(loop.time()), guard.num_quarantined(loop.time()))
    found = cluster.telemetry.recorded_metrics()
    return {kind: found[Metrics.CIRCUITS, frozenset({(Attribute.KIND, kind)})] for kind in ("open", "half_open")}


def test_a_store_that_does_not_answer_counts_against_no_adapter() -> None:
    async def test(cluster: RouterCluster) -> None:
        set_scripts(cluster, no_store)
        for _ in range(2 * ADAPTER_THRESHOLD):
            answer = await cluster.ask(text_request(), x_adapter_id="upper")
            assert error_of(answer) == (Code.UNAVAILABLE, "adapter_unavailable")
            assert answer.error is not None
            assert answer.error.retry_after_s == 1.0
        assert (await status_of(cluster.client)).circuits == []
        set_scripts(cluster, say("hello"))
        assert (await cluster.ask(text_request(), x_adapter_id="upper")).text == "hello"

    simulate(test)


def test_an_adapter_that_keeps_failing_is_refused_until_a_probe_succeeds() -> None:
    async def test(cluster: RouterCluster) -> None:
        set_scripts(cluster, no_adapter)
        for _ in range(ADAPTER_THRESHOLD):
            answer = await cluster.ask(text_request(), x_adapter_id="upper")
            assert error_of(answer) == (Code.FAILED_PRECONDITION, "adapter_failed")
        queued = len(cluster.scheduler.enqueued)
        answer = await cluster.ask(text_request(), x_adapter_id="upper")
        assert error_of(answer) == (Code.UNAVAILABLE, "circuit_open")
        assert answer.error is not None
        assert answer.error.retry_after_s is not None
        assert 0 < answer.error.retry_after_s <= MIN_OPEN_S
        assert (answer.frames, len(cluster.scheduler.enqueued)) == ([], queued), "nothing was done for it"
        assert (await cluster.ask(text_request())).text == "fine"
        foreign = await cluster.ask(text_request(), x_tenant_id="other", x_adapter_id="secret")
        assert error_of(foreign) == (Code.FAILED_PRECONDITION, "adapter_failed")

        (circuit,) = (await status_of(cluster.client)).circuits
        assert (circuit.tenant_id, circuit.adapter_version, circuit.whole_tenant) == ("acme", "a" * 64, False)
        assert (circuit.router_id, circuit.half_open, circuit.openings) == ("router-0", False, 1)
        assert 0 < circuit.retry_after_s <= MIN_OPEN_S
        assert await circuits_told(cluster) == {"open": 1, "half_open": 0}

        set_scripts(cluster, say("hello"))
        await asyncio.sleep(answer.error.retry_after_s)
        assert (await status_of(cluster.client)).circuits[0].half_open
        wrong = await cluster.ask(text_request(n=99), x_adapter_id="upper")
        assert error_of(wrong) == (Code.INVALID_ARGUMENT, "invalid"), "no probe, so it decides nothing"
        answers = await asyncio.gather(*(cluster.ask(text_request(), x_adapter_id="upper") for _ in range(3)))
        assert sorted(a.text for a in answers) == ["", "", "hello"], "one probe at a time"
        assert (await status_of(cluster.client)).circuits == []
        assert (await cluster.ask(text_request(), x_adapter_id="upper")).text == "hello"
        assert await circuits_told(cluster) == {"open": 0, "half_open": 0}

    simulate(test)


def test_an_answer_that_goes_on_as_a_probe_closes_the_circuit_with_its_next_token() -> None:
    """Not with its end: what it said before its worker was lost proves nothing, and what it says next does."""

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        async for response in (say("x" * 200, pause_s=0.5) if request.max_tokens == 200 else no_adapter)(request):
            yield response

    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request(max_tokens=200), x_adapter_id="upper")
        for _ in range(3):
            await stream.read()
        for _ in range(ADAPTER_THRESHOLD):
            await cluster.ask(text_request(), x_adapter_id="upper")
        assert await circuits_told(cluster) == {"open": 1, "half_open": 0}
        await asyncio.sleep(MIN_OPEN_S)
        cluster.network.kill(next(worker for worker in cluster.workers if worker.running).worker_id)
        seen: list[float] = []
        for _ in range(20):
            await stream.read()
            seen = list((await circuits_told(cluster)).values())
            if seen == [0, 0]:
                break
        assert seen == [0, 0], "it goes on, and the circuit is closed"
        answer = await cluster.ask(text_request(), x_adapter_id="upper")
        assert error_of(answer) == (Code.FAILED_PRECONDITION, "adapter_failed"), "not refused"
        stream.cancel()

    simulate(test, script=script)


@pytest.mark.parametrize("kind", ["lost", "internal"])
def test_a_request_that_workers_fail_at_is_not_run_a_third_time(kind: str) -> None:
    async def deadly(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        if list(request.prompt_token_ids) != ids_of("die"):
            async for response in say("fine")(request):
                yield response
            return
        yield STARTED
        yield tokens(1, len(request.emitted[0].token_ids) if request.emitted else 0, ids_of("x"))
        if kind == "lost":
            raise RpcError(Code.UNAVAILABLE, "connection reset")
        yield finished(2, common_pb2.OUTCOME_INTERNAL, "the step failed")

    async def test(cluster: RouterCluster) -> None:
        code = {"lost": Code.UNAVAILABLE, "internal": Code.INTERNAL}[kind]
        for _ in range({"lost": 1, "internal": 2}[kind]):  # who is lost is gone on with, once
            assert error_of(await cluster.ask(text_request("die")))[0] is code
        runs = sum(len(w.executed) for w in cluster.workers)
        answer = await cluster.ask(text_request("die"))
        assert error_of(answer) == (Code.FAILED_PRECONDITION, "quarantined")
        assert sum(len(w.executed) for w in cluster.workers) == runs
        assert (await cluster.ask(text_request("live"))).text == "fine"
        other = await cluster.ask(text_request("die"), x_tenant_id="other")
        assert error_of(other)[0] is code, "another tenant's prompt is its own"
        status = await status_of(cluster.client)
        count = {"lost": 2, "internal": 1}[kind]
        assert (status.quarantined_prompts, list(status.circuits)) == (count, [])
        await asyncio.sleep(RECORD_S)
        assert cluster.telemetry.recorded_metrics()[Metrics.QUARANTINED_PROMPTS, frozenset()] == count

    simulate(test, script=deadly)


def test_a_worker_that_is_stopping_is_no_failure_of_the_request() -> None:
    async def stopping(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        yield finished(1, common_pb2.OUTCOME_WORKER_LOST, "the worker is shutting down")

    async def test(cluster: RouterCluster) -> None:
        for _ in range(3 * ADAPTER_THRESHOLD):
            assert error_of(await cluster.ask(text_request()))[1] == "worker_lost"
        assert (await status_of(cluster.client)).circuits == []

    simulate(test, script=stopping)


def test_service_levels_count_what_is_the_services_doing() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", SLO)
        await until(lambda: "slo" in cluster.app.directory.tenants["acme"].policy_yaml)
        ask = {"x_request_class": "interactive"}
        for _ in range(6):
            assert (await cluster.ask(text_request(), **ask)).error is None
        set_scripts(cluster, no_adapter)
        assert error_of(await cluster.ask(text_request(), x_adapter_id="upper", **ask))[1] == "adapter_failed"

        # None of these is the service's doing.
        assert error_of(await cluster.ask(text_request(n=99), **ask))[0] is Code.INVALID_ARGUMENT
        assert error_of(await cluster.ask(text_request(), x_adapter_id="nobody", **ask))[0] is Code.NOT_FOUND
        assert error_of(await cluster.ask(text_request(), x_request_class="gold"))[0] is Code.INVALID_ARGUMENT
        assert error_of(await cluster.ask(text_request(), x_tenant_id="nobody", **ask))[0] is Code.NOT_FOUND
        breach = scheduler_pb2.QuotaBreach(quota="quotas.concurrency", tenant_id="acme", limit=1, description="full")
        cluster.scheduler.refusal = scheduler_pb2.Refusal(
            code=Code.RESOURCE_EXHAUSTED, message="quota", retry_after_s=1.0, breaches=[breach]
        )
        assert error_of(await cluster.ask(text_request(), **ask))[1] == "quota_exceeded"
        cluster.scheduler.refusal = None
        cluster.scheduler.holds = True
        gone = cluster.open(text_request(), **ask)
        await until(lambda: bool(cluster.scheduler.queued))
        gone.cancel()
        await until(lambda: not cluster.app.live_requests())
        cluster.scheduler.holds = False

        # Slow first tokens are late, and good.
        async def slow(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            async for response in say("slow", pause_s=0.15)(request):
                yield response

        set_scripts(cluster, slow)
        assert (await cluster.ask(text_request(), **ask)).error is None

        (slo,) = (await status_of(cluster.client)).slos
        assert (slo.tenant_id, slo.qos_class) == ("acme", common_pb2.QOS_CLASS_INTERACTIVE)
        assert (slo.requests, slo.failed, slo.measured) == (8, 1, 7)
        assert slo.availability == pytest.approx(7 / 8)
        assert (slo.availability_target, slo.ttft_p95_target_ms) == (0.75, 100)
        assert slo.error_budget == pytest.approx(0.5)
        assert slo.ttft_p50_ms < 100 < 150 <= slo.ttft_p95_ms <= slo.ttft_p99_ms < 200
        assert slo.ttft_met is False
        # The fake's answers have 5 ms of decode: 11 tokens six times, 4 once.
        assert 0.5 <= slo.tpot_p50_ms <= 0.5 * 1.1
        assert 5 / 3 <= slo.tpot_p95_ms <= 5 / 3 * 1.1
        (counts,) = (await status_of(cluster.client, local_only=True)).slo_counts
        assert (counts.good, counts.bad, counts.in_time, counts.late) == (7, 1, 6, 1)

        # Metrics say the same, of this flow alone: no other has a target.
        whose = {(Attribute.TENANT_ID, "acme"), (Attribute.QOS_CLASS, "interactive")}
        told = {
            (name, labels): value
            for (name, labels), value in cluster.telemetry.recorded_metrics().items()
            if name.otlp.startswith("manylora.slo.")
        }
        ttft_ms, tpot_ms = (told.pop((name, frozenset(whose))) for name in (Metrics.SLO_TTFT, Metrics.SLO_TPOT))
        assert told == {
            (Metrics.SLO_REQUESTS, frozenset({*whose, (Attribute.VERDICT, "good")})): 7,
            (Metrics.SLO_REQUESTS, frozenset({*whose, (Attribute.VERDICT, "bad")})): 1,
            (Metrics.SLO_FIRST_TOKENS, frozenset({*whose, (Attribute.VERDICT, "in_time")})): 6,
            (Metrics.SLO_FIRST_TOKENS, frozenset({*whose, (Attribute.VERDICT, "late")})): 1,
            (Metrics.SLO_AVAILABILITY_TARGET, frozenset(whose)): 0.75,
        }
        assert 150 <= ttft_ms < 300
        assert tpot_ms == pytest.approx(6 * 5 / 10 + 5 / 3)

        await asyncio.sleep(400)
        (slo,) = (await status_of(cluster.client)).slos
        assert (slo.requests, slo.measured, slo.HasField("ttft_p95_ms"), slo.HasField("ttft_met")) == (
            8,
            0,
            False,
            False,
        )

    simulate(test)


def test_levels_of_all_routers_add_up_and_a_tenant_sees_its_own() -> None:
    async def test(cluster: RouterCluster) -> None:
        second = RouterApp(
            RouterConfig(adapter_store="unused", router_id="router-1", default_max_tokens=32),
            transport=cluster.network.transport("router-b"),
            store=cluster.store_server.client(),
            text=FakeText(),
            adapter_store=(files := MemoryAdapterFiles()),
            documents=MemoryDocuments(files),
            telemetry=Telemetry.disabled(),
            rng=random.Random(1),
            peer_secret=SIMULATED,
            clock=FakeClock(),
        )
        await second.start()
        await until(lambda: len(cluster.app.directory.routers) == 2)
        key = await cluster.put_key(tenant="acme", scopes=("generate",))
        await until(lambda: len(cluster.app.directory.api_keys) == len(second.directory.api_keys) == 2)
        mine = cluster.caller(key)
        transport = cluster.network.transport("client")
        there = KeyedChannel(transport.connect(second.address), key)
        try:
            for channel, count in ((mine, 2), (there, 3)):
                for _ in range(count):
                    answer = await read_all(channel.stream(GENERATE, text_request()))
                    assert answer.error is None
            assert (await cluster.ask(text_request(), x_tenant_id="other")).error is None
            set_scripts(cluster, no_adapter)
            for _ in range(ADAPTER_THRESHOLD):
                stream = there.stream(GENERATE, text_request(), metadata={"x-adapter-id": "upper"})
                assert error_of(await read_all(stream))[1] == "adapter_failed"

            whole = await status_of(cluster.client)
            assert [(s.tenant_id, s.requests, s.failed) for s in whole.slos] == [("acme", 10, 5), ("other", 1, 0)]
            assert [(c.tenant_id, c.router_id) for c in whole.circuits] == [("acme", "router-1")]
            assert [(r.router_id, r.answered) for r in whole.routers] == [("router-0", True), ("router-1", True)]
            own = await status_of(mine)
            assert [(s.tenant_id, s.requests, s.failed) for s in own.slos] == [("acme", 10, 5)]
            assert [(c.tenant_id, c.router_id) for c in own.circuits] == [("acme", "")]
            assert (list(own.routers), list(own.slo_counts)) == ([], [])
            local = await status_of(mine, local_only=True)
            assert [(c.tenant_id, c.good) for c in local.slo_counts] == [("acme", 2)]

            # A prompt is quarantined at the router that saw it fail; an operator lifts it everywhere from any.
            set_scripts(cluster, lost)
            assert error_of(await read_all(there.stream(GENERATE, text_request("die"))))[1] == "worker_lost"
            refused = await read_all(there.stream(GENERATE, text_request("die")))
            assert error_of(refused) == (Code.FAILED_PRECONDITION, "quarantined")
            (told,) = (await status_of(cluster.client)).quarantines
            assert (told.tenant_id, told.router_id, told.prompts) == ("acme", "router-1", 1)
            assert 290 < told.longest_s <= 300
            (told,) = (await status_of(mine)).quarantines
            assert (told.tenant_id, told.router_id, told.prompts) == ("acme", "", 1)
            with pytest.raises(RpcError, match="PERMISSION_DENIED"):
                await lift(mine, "acme")
            with pytest.raises(RpcError, match="tenant_id: is missing"):
                await lift(cluster.client, "")
            assert (await lift(cluster.client, "other")).prompts == 0
            lifted = await lift(cluster.client, "acme")
            assert (lifted.prompts, list(lifted.missed_router_ids)) == (1, [])
            set_scripts(cluster, say("fine"))
            assert (await read_all(there.stream(GENERATE, text_request("die")))).text == "fine"

            record = RouterRecord(router_id="router-9", address="nobody:1")
            await cluster.store.put(keys.router("router-9"), record.to_json())
            await until(lambda: len(cluster.app.directory.routers) == 3)
            whole = await status_of(cluster.client)
            assert [s.requests for s in whole.slos] == [13, 1]
            assert [r.answered for r in whole.routers] == [True, True, False]
            assert list((await lift(cluster.client, "acme")).missed_router_ids) == ["router-9"]
        finally:
            await mine.close()
            await there.close()
            await second.stop(0.0)

    simulate(test)
