"""A call's record tells its stages while it runs and its figures when it has ended."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.history.lives import Life
from manylora_shared.errors import NotFound
from router_fakes import RouterCluster, say, simulate, text_request, until


def lives(cluster: RouterCluster, tenant: str = "acme") -> list[Life]:
    return list(cluster.app.calls.recent.lives.newest(tenant))


def test_a_whole_life() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(), x_adapter_id="upper", x_request_class="interactive")
        (life,) = lives(cluster)
        assert answer.frames[0].started.request_id == life.request_id
        assert (life.outcome, life.stage, life.qos_class) == ("completed", "ended", "interactive")
        assert (life.adapter, life.adapter_digest, life.adapter_found) == ("upper@1", "a" * 64, "store")
        assert life.worker_id.startswith("worker-")
        assert (life.attempts, life.prefill_ms, life.decode_ms) == (1, 3.0, 5.0)
        assert life.completion_tokens == len("hello world")
        times = [life.arrived_at, life.admitted_at, life.granted_at, life.started_at, life.first_token_at]
        times += [life.last_token_at, life.ended_at]
        assert all(at is not None for at in times)
        assert times == sorted(times)  # type: ignore[type-var]

    simulate(test)


def test_a_waiting_one_is_seen() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        asking = asyncio.create_task(cluster.ask(text_request()))
        await until(lambda: len(cluster.scheduler.queued) == 1)
        (life,) = cluster.app.calls.lives()
        assert life.stage == "queued"
        cluster.app.calls.close_step()
        row = cluster.app.calls.recent.samples.rows("acme")[0]
        assert row is not None
        assert (row.waiting, row.running) == (1, 0)
        asking.cancel()
        await until(lambda: life.stage == "ended")
        assert life.outcome == "cancelled"

    simulate(test)


def test_a_refused_one_has_its_reason() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(), x_adapter_id="nothing")
        assert answer.error is not None
        (life,) = lives(cluster)
        assert life.outcome == NotFound.label
        assert life.admitted_at is None

    simulate(test)


def test_strangers_and_unknown_tenants_leave_nothing() -> None:
    async def test(cluster: RouterCluster) -> None:
        with pytest.raises(AssertionError):  # a request without an answer has no first frame
            assert (await cluster.ask(text_request(), x_tenant_id="nobody")).frames
        assert len(cluster.app.calls.recent.lives) == 0

    simulate(test)


def test_pauses_between_tokens_are_found() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.ask(text_request())
        (life,) = lives(cluster)
        assert 0.01 <= life.longest_pause_s <= 0.1
        assert life.pause_ended_at is not None

    simulate(test, script=say("hello world", pause_s=0.02))
