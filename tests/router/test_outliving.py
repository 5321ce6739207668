"""Over HTTP: an answer that waits for its caller, the events that the caller lacks, and work that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_fakes import Front, http_front
from manylora.v1 import common_pb2, worker_pb2
from manylora_router.front.http.api.completions import MAX_PROMPTS
from manylora_router.guard.admission import seed_of_key
from manylora_shared.errors import Code, RpcError
from router_fakes import STARTED, finished, say

HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": HI, "logprobs": True},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 30},
}
SLOW = say(TEXT, per_frame=2, pause_s=0.01)


def client_of(front: Front) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=front.url, headers={"authorization": f"Bearer {front.key}"}, timeout=30)


async def events(client: httpx.AsyncClient, path: str, most: int = 1000, **headers: str) -> list[str]:
    """The first of them; then the connection is cut."""
    found: list[str] = []
    body = {"model": "tiny", "stream": True, **CALLS[path]}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.stream("POST", path, json=body, headers=sent) as answer:
        assert answer.status_code == 200, await answer.aread()
        text = ""
        async for part in answer.aiter_text():
            *whole, text = (text + part).split("\n\n")
            found += whole
            if len(found) >= most:
                return found[:most]
    return found


def id_of(event: str) -> str:
    return event.partition("\n")[0].removeprefix("id: ")


def executed(front: Front) -> int:
    return sum(len(worker.executed) for worker in front.cluster.workers)


@pytest.mark.parametrize("path", CALLS)
async def test_who_comes_back_gets_what_is_missing(path: str) -> None:
    async with http_front(SLOW) as front, client_of(front) as client:
        head = await events(client, path, 3, x_keep_s="5")
        tail = await events(client, path, last_event_id=id_of(head[-1]))
        whole = await events(client, path, last_event_id=id_of(head[0]).partition("-")[0] + "-0")
        assert whole == head + tail
        assert [id_of(event).rpartition("-")[2] for event in whole] == [str(i + 1) for i in range(len(whole))]
        nothing = await events(client, path, last_event_id=id_of(whole[-1]))
        assert nothing == []
        assert executed(front) == 1
        plain = await events(client, path)
        assert not any(event.startswith("id: ") for event in plain), "who does not ask has no ids"
        assert len(plain) == len(whole)


async def test_a_key_does_the_work_once() -> None:
    async with http_front(SLOW) as front, client_of(front) as client:
        for path, fields in CALLS.items():
            before, body = executed(front), {"model": "tiny", **fields}
            body.pop("stream_options", None)
            headers = {"Idempotency-Key": path}
            first, second = await asyncio.gather(*(client.post(path, json=body, headers=headers) for _ in range(2)))
            third = await client.post(path, json=body, headers=headers)
            assert first.status_code == second.status_code == 200, first.text
            assert third.json() == first.json()
            assert executed(front) == before + 1
            reused = await client.post(path, json={**body, "temperature": 0.5}, headers=headers)
            assert reused.status_code == 422
            assert "Idempotency-Key".lower() in reused.text


async def test_each_of_several_prompts_is_done_once() -> None:
    async with http_front(SLOW) as front, client_of(front) as client:
        body, headers = {"prompt": ["a", "b", "c"]}, {"Idempotency-Key": "k"}
        answers = [await client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        assert len(answers[0].json()["choices"]) == 3
        assert executed(front) == 3


async def test_each_of_as_many_prompts_as_a_call_may_have_is_done_once() -> None:
    async with http_front(say("fox")) as front, client_of(front) as client:
        for count in 49, MAX_PROMPTS:
            before, body = executed(front), {"prompt": ["the same"] * count, "temperature": 1}
            answers = [
                await client.post("/v1/completions", json=body, headers={"Idempotency-Key": f"k{count}"})
                for _ in range(2)
            ]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            assert answers[0].json() == answers[1].json()
            assert executed(front) == before + count
            requests = [each for worker in front.cluster.workers for each in worker.executed]
            seeds = {each.sampling.seed for each in requests}
            assert seed_of_key("acme", f"k{count}") in seeds
        assert len(seeds) == 49 + MAX_PROMPTS, "each is a sample of its own"


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_whoever_lost_its_worker_is_told_when_to_try_again(is_stopping: bool) -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        if not is_stopping:
            raise RpcError(Code.UNAVAILABLE, "connection reset")
        yield finished(1, common_pb2.OUTCOME_WORKER_LOST, "it is stopping")

    async with http_front(script) as front, client_of(front) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("headers", "body", "status", "named"),
    [
        ({"x-keep-s": "0"}, {"stream": True}, 400, "x-keep-s"),
        ({"x-keep-s": "61"}, {"stream": True}, 400, "x-keep-s"),
        ({"x-keep-s": "5"}, {}, 400, "x-keep-s"),
        ({"x-keep-s": "5"}, {"stream": True, "prompt": ["a", "b"]}, 400, "x-keep-s"),
        ({"last-event-id": "what"}, {"stream": True}, 400, "last-event-id"),
        ({"last-event-id": "f" * 32 + "-1"}, {"stream": True}, 404, "last-event-id"),
        ({"idempotency-key": "x" * 129}, {}, 400, "idempotency-key"),
    ],
)
async def test_what_does_not_fit_is_refused(
    headers: dict[str, str], body: dict[str, object], status: int, named: str
) -> None:
    async with http_front(SLOW) as front, client_of(front) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", **body}, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == named
        assert executed(front) == 0


async def test_another_tenants_answer_is_not_there() -> None:
    async with http_front(SLOW) as front, client_of(front) as client:
        head = await events(client, "/v1/completions", 2, x_keep_s="1")
        key = await front.cluster.put_key(tenant="other")
        await asyncio.sleep(0.1)
        headers = {"authorization": f"Bearer {key}", "last-event-id": id_of(head[-1])}
        answer = await client.post("/v1/completions", json={"prompt": "hi", "stream": True}, headers=headers)
        assert answer.status_code == 404
        await asyncio.sleep(0.2)
