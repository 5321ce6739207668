"""Scores of earlier answers: whose, which version's, once, and for how long."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_fakes import http_front
from manylora.v1 import inference_pb2
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.front.feedback import ASKING, FeedbackDesk
from manylora_router.guard.admission import Adapter
from manylora_router.guard.feedback import HOLD_S, KEPT_S, MAX_OF_TENANT, Feedback
from manylora_shared.adapter_reference import AdapterPart
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import Code, NotFound, Overloaded, RpcError
from manylora_shared.ids import AdapterName, AdapterUid, TenantId
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.base import methods_of
from manylora_sim.fake_text import FakeText
from manylora_sim.peers import SIMULATED
from router_fakes import KeyedChannel, RouterCluster, simulate, text_request, until
from test_admin_adapters import call
from test_admin_versions import NAME, add_two
from test_trials import told

ACME, OTHER = TenantId("acme"), TenantId("other")
UP = Adapter("up", AdapterUid("d@u"), (AdapterPart(AdapterName("up"), 2),))
GIVE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["GiveFeedback"]


def test_a_score_counts_once_with_its_last_value() -> None:
    feedback = Feedback()
    feedback.answered(ACME, "r1", UP, 0.0)
    assert feedback.score(ACME, "r1", 0.2, 1.0).adapter == UP
    feedback.score(ACME, "r1", 0.9, 2.0)
    assert feedback.due(1.0 + HOLD_S - 0.1) == []
    [counted] = feedback.due(1.0 + HOLD_S)
    assert (counted.score, counted.is_counted) == (0.9, True)
    assert feedback.score(ACME, "r1", 0.0, 20.0).score == 0.9
    assert feedback.due(100.0) == []


def test_anothers_answer_is_as_unknown_as_none() -> None:
    feedback = Feedback()
    feedback.answered(ACME, "r1", UP, 0.0)
    said = []
    for tenant, request_id in ((OTHER, "r1"), (ACME, "r2")):
        with pytest.raises(NotFound) as refused:
            feedback.score(tenant, request_id, 1.0, 1.0)
        said.append(refused.value.message.replace(request_id, "?"))
    assert len(set(said)) == 1
    with pytest.raises(NotFound):
        feedback.score(ACME, "r1", 1.0, KEPT_S)
    assert len(feedback) == 0


def test_memory_is_bounded_and_no_tenant_takes_anothers() -> None:
    feedback = Feedback()
    feedback.answered(OTHER, "quiet", None, 0.0)
    for i in range(MAX_OF_TENANT + 10):
        feedback.answered(ACME, f"r{i}", UP, 1.0)
    assert len(feedback) == MAX_OF_TENANT + 1
    assert feedback.score(OTHER, "quiet", 1.0, 2.0).adapter is None
    with pytest.raises(NotFound):
        feedback.score(ACME, "r9", 1.0, 2.0)
    for each in range(20):
        for i in range(MAX_OF_TENANT):
            feedback.answered(TenantId(f"t{each}"), f"t{each}-{i}", None, 3.0)
    assert len(feedback) == 10 * MAX_OF_TENANT


async def give(channel: KeyedChannel, request_id: str, score: float, **metadata: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in metadata.items()}
    return await channel.call(
        GIVE, inference_pb2.GiveFeedbackRequest(request_id=request_id, score=score), metadata=sent
    )


def test_a_score_reaches_the_trial_of_the_version_that_answered() -> None:
    async def test(cluster: RouterCluster) -> None:
        await add_two(cluster)
        await call(cluster, "RolloutAdapter", **NAME, to=2, auto={"steps": [50]})
        mine = cluster.caller(await cluster.put_key(tenant="acme"))
        others = cluster.caller(await cluster.put_key(tenant="other"))
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        given = {"lower@1": 0, "lower@2": 0}
        for _ in range(12):
            started = (await cluster.ask(text_request(), x_adapter_id="lower")).frames[0].started
            answer = await give(mine, started.request_id, 0.5)
            assert (answer.adapter, answer.counted) == (started.adapter, True)
            given[started.adapter] += 1
            with pytest.raises(RpcError) as refused:
                await give(others, started.request_id, 0.0)
            assert refused.value.code is Code.NOT_FOUND
        await until(lambda: sum(sum(each.scores.values()) for each in told(cluster)) == 12)
        assert [dict(each.scores) for each in told(cluster)] == [{5: given["lower@2"]}, {5: given["lower@1"]}]
        late = await give(mine, started.request_id, 0.0)
        assert not late.counted
        for request_id, score, field in (("", 0.5, "request_id"), ("x", 1.5, "score"), ("x", float("nan"), "score")):
            with pytest.raises(RpcError) as refused:
                await give(mine, request_id, score)
            assert [v.field for v in refused.value.violations] == [field]

    simulate(test)


def test_another_router_than_the_one_that_answered_takes_it_too() -> None:
    async def test(cluster: RouterCluster) -> None:
        second = RouterApp(
            RouterConfig(adapter_store="unused", router_id="router-1"),
            transport=cluster.network.transport("router-1"),
            store=cluster.store_server.client(),
            text=FakeText(),
            adapter_store=cluster.files,
            documents=cluster.documents,
            telemetry=Telemetry.recording("router"),
            rng=random.Random(5),
            peer_secret=SIMULATED,
            clock=cluster.clock,
        )
        await second.start()
        key = await cluster.put_key(tenant="acme")
        await until(lambda: len(second.directory.api_keys) == 2 and len(second.directory.routers) == 2)
        channel = KeyedChannel(cluster.network.transport("client").connect(second.address), key)
        started = (await cluster.ask(text_request(), x_adapter_id="upper")).frames[0].started
        assert (await give(channel, started.request_id, 1.0)).adapter == "upper@1"
        with pytest.raises(RpcError) as refused:
            await give(channel, "f" * 32, 1.0)
        assert refused.value.code is Code.NOT_FOUND
        lost = RouterRecord("router-9", "nowhere:1")
        await cluster.store.put(keys.router("router-9"), lost.to_json())
        await until(lambda: len(second.directory.routers) == 3)
        with pytest.raises(RpcError) as refused:
            await give(channel, "f" * 32, 1.0)
        assert (refused.value.code, "router-9" in refused.value.message) == (Code.UNAVAILABLE, True)
        await channel.close()
        await second.stop(0.0)

    simulate(test)


async def test_over_http_by_the_answers_id() -> None:
    async with http_front() as front, httpx.AsyncClient() as client:
        headers = {"authorization": f"Bearer {front.key}"}

        async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            answer = await client.post(f"{front.url}{path}", json=body, headers=headers)
            return answer.status_code, answer.json()

        _, answer = await post("/v1/completions", {"model": "upper", "prompt": "hi"})
        told = {"object": "feedback", "request_id": answer["id"], "adapter": "upper@1", "score": 1.0, "counted": True}
        assert await post("/v1/feedback", {"request_id": answer["id"], "thumb": "up"}) == (200, told)
        told["score"] = 0.25
        assert await post("/v1/feedback", {"request_id": answer["id"], "score": 0.25}) == (200, told)
        status, error = await post("/v1/feedback", {"request_id": "cmpl-7", "score": 0})
        assert (status, error["error"]["type"]) == (404, "not_found_error")
        for wrong, param in (
            ({"score": 1}, "request_id"),
            ({"request_id": "x"}, "score"),
            ({"request_id": "x", "score": 1, "thumb": "up"}, "score"),
            ({"request_id": "x", "thumb": "sideways"}, "thumb"),
            ({"request_id": "x", "score": 2}, "score"),
            ({"request_id": "x", "score": 1, "why": "?"}, "why"),
        ):
            status, error = await post("/v1/feedback", wrong)
            assert (status, error["error"]["param"]) == (400, param)


async def test_who_asks_for_unknown_answers_without_end_leaves_others_their_places() -> None:
    """Each opens a line to every router."""
    answered = asyncio.Event()

    class Others:
        async def ask(self, *_: Any) -> dict[str, Any]:
            await answered.wait()
            return {}

    desk = FeedbackDesk(SimpleNamespace(feedback=Feedback()), Others())  # type: ignore[arg-type]
    unknown = inference_pb2.GiveFeedbackRequest(request_id="r", score=1.0)
    asking = [asyncio.create_task(desk.give("acme", unknown, {})) for _ in range(2 * ASKING)]
    await asyncio.sleep(0)
    refused = sum(task.done() and isinstance(task.exception(), Overloaded) for task in asking)
    assert ASKING < refused < 2 * ASKING
    other = asyncio.create_task(desk.give("other", unknown, {}))
    await asyncio.sleep(0)
    assert not other.done()
    answered.set()
    found = await asyncio.gather(other, *asking, return_exceptions=True)
    assert {type(each) for each in found} == {NotFound, Overloaded}
