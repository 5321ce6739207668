"""Two routers: an answer that one keeps is joined, replayed and gone on with at the other one, and done once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from http_fakes import Front, http_front
from manylora.v1 import answers_pb2, common_pb2, inference_pb2, worker_pb2
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.front.http.routes import Routes
from manylora_router.front.http.server import HttpServer
from manylora_router.front.kept_answers import KeptAnswers
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.base import methods_of
from manylora_sim.fake_text import FakeText
from manylora_sim.peers import SIMULATED
from router_fakes import (
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

TEXT = "".join(chr(97 + i % 26) for i in range(120))
SLOW = say(TEXT, per_frame=2, pause_s=0.01)
READ = methods_of(answers_pb2.DESCRIPTOR.services_by_name["AnswerService"])["ReadAnswer"]


@asynccontextmanager
async def second_router(cluster: RouterCluster) -> AsyncIterator[RouterApp]:
    app = RouterApp(
        RouterConfig(adapter_store="unused", router_id="router-1", default_max_tokens=32),
        transport=cluster.network.transport("router-1"),
        store=cluster.store_server.client(),
        text=FakeText(),
        adapter_store=cluster.files,
        documents=cluster.documents,
        telemetry=Telemetry.disabled(),
        rng=random.Random("router-1"),  # its ids are not those of the first one, which has a seed of its own
        peer_secret=SIMULATED,
        clock=cluster.clock,
    )
    await app.start()
    await until(lambda: len(cluster.app.directory.routers) == 2)
    try:
        yield app
    finally:
        await app.stop(0.0)


class Other:
    """Asks the second router, with the first one's key."""

    def __init__(self, cluster: RouterCluster, app: RouterApp) -> None:
        channel = cluster.network.transport("client").connect(app.address)
        self.channel = KeyedChannel(channel, cluster.client._credentials["authorization"].removeprefix("Bearer "))

    async def ask(self, request: inference_pb2.GenerateRequest, **metadata: str) -> Answer:
        sent = {"x-tenant-id": "acme"} | {name.replace("_", "-"): value for name, value in metadata.items()}
        return await read_all(self.channel.stream(GENERATE, request, metadata=sent))


def executed(cluster: RouterCluster) -> int:
    return sum(len(worker.executed) for worker in cluster.workers)


def test_a_key_does_the_work_once_over_two_routers() -> None:
    async def test(cluster: RouterCluster) -> None:
        async with second_router(cluster) as app:
            other, request = Other(cluster, app), text_request(max_tokens=100)
            first, second = await asyncio.gather(
                cluster.ask(request, idempotency_key="k"), other.ask(request, idempotency_key="k")
            )
            third = await other.ask(request, idempotency_key="k")
            assert first.frames == second.frames == third.frames, "frame by frame"
            assert third.text == TEXT[:100]
            assert executed(cluster) == 1
            await until(lambda: len(cluster.scheduler.settled) == 1)
            reused = await other.ask(text_request("another"), idempotency_key="k")
            assert reused.error is not None
            assert (reused.error.code, reused.error.label) == (Code.INVALID_ARGUMENT, "idempotency_key_reused")
            assert (await other.ask(request, idempotency_key="k", x_tenant_id="other")).error is None
            assert executed(cluster) == 2, "another tenant's key is another key"

    simulate(test, script=SLOW)


def test_what_its_router_let_go_of_is_done_again_and_what_went_with_it_is_not() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = text_request()
        async with second_router(cluster) as app:
            other = Other(cluster, app)
            assert (await other.ask(request, idempotency_key="gone")).error is None
            assert (await other.ask(request, idempotency_key="let go")).error is None
            for answer in app.kept.all():
                if answer.key == "0 let go":
                    app.kept._by_id.pop(("acme", answer.request_id))  # its record stands
                    app.kept._by_key.pop(("acme", answer.key))
            assert (await cluster.ask(request, idempotency_key="let go")).error is None
            assert executed(cluster) == 3
        await until(lambda: len(cluster.app.directory.routers) == 1)
        refused = await cluster.ask(request, idempotency_key="gone")
        assert refused.error is not None
        assert (refused.error.code, refused.error.label) == (Code.ABORTED, "answer_lost")
        assert executed(cluster) == 3

    simulate(test)


def test_who_lost_its_connection_goes_on_at_another_router_with_the_same_work() -> None:
    async def test(cluster: RouterCluster) -> None:
        async with second_router(cluster) as app:
            request = text_request(max_tokens=100, resumable=True)
            stream, head = cluster.open(request, idempotency_key="k"), Answer()
            for _ in range(7):
                head.frames.append(await stream.read())
            stream.cancel()
            request.resume.token = head.frames[0].started.resume_token
            request.resume.next_frame = len(head.frames)
            request.resume.emitted.add(token_ids=head.ids_of(), text_characters=len(head.text_of(0)))
            tail = await Other(cluster, app).ask(request, idempotency_key="k")
            answer = Answer([*head.frames, *tail.frames], tail.error)
            assert answer.finished.usage.completion_tokens == 100
            assert answer.text == TEXT[:100]
            assert executed(cluster) == 1

    simulate(test, script=SLOW)


@pytest.mark.parametrize("is_far", [False, True])
def test_who_was_being_told_what_it_had_already_gets_none_of_it_twice(is_far: bool) -> None:
    """It had the tokens of a router that is gone, and lost the next one behind the first frame."""

    async def test(cluster: RouterCluster) -> None:
        async with second_router(cluster) as app:
            request = text_request(max_tokens=100, resumable=True)
            stream = cluster.open(request, idempotency_key="k")
            head = Answer([await stream.read() for _ in range(7)])
            stream.cancel()
            request.resume.token, request.resume.next_frame = head.frames[0].started.resume_token, 1
            request.resume.emitted.add(token_ids=head.ids_of(), text_characters=len(head.text_of(0)))
            asked = Other(cluster, app) if is_far else cluster
            tail = await asked.ask(request, idempotency_key="k")
            answer = Answer([*head.frames, *tail.frames], tail.error)
            assert (answer.ids_of(), answer.text) == (ids_of(TEXT[:100]), TEXT[:100])
            assert executed(cluster) == 1

    simulate(test, script=SLOW)


def test_a_kept_answer_is_gone_on_with_at_another_router_without_its_tokens() -> None:
    async def test(cluster: RouterCluster) -> None:
        async with second_router(cluster) as app:
            request = text_request(max_tokens=100, resumable=True, keep_s=5)
            stream = cluster.open(request)
            head = Answer([await stream.read() for _ in range(5)])
            stream.cancel()
            request.resume.token, request.resume.next_frame = head.frames[0].started.resume_token, 5
            other = Other(cluster, app)
            tail = await other.ask(request)
            assert Answer([*head.frames, *tail.frames]).finished.usage.completion_tokens == 100
            assert head.text_of(0) + tail.text_of(0) == TEXT[:100]
            assert executed(cluster) == 1
            await asyncio.sleep(6.0)
            lost = await other.ask(request)
            assert lost.error is not None
            assert (lost.error.code, "resume.token" in lost.error.message) == (Code.NOT_FOUND, True)

    simulate(test, script=SLOW)


def test_a_router_that_stops_hands_over_what_it_reads_from_another() -> None:
    async def test(cluster: RouterCluster) -> None:
        async with second_router(cluster) as app:
            first = asyncio.create_task(cluster.ask(text_request(max_tokens=100), idempotency_key="k"))
            await until(lambda: executed(cluster) == 1)
            request = text_request(max_tokens=100, resumable=True)
            reading = asyncio.create_task(Other(cluster, app).ask(request, idempotency_key="k"))
            await asyncio.sleep(0.2)
            await app.stop(30.0)
            cut = await reading
            assert cut.error is not None
            assert (cut.error.code, cut.error.label) == (Code.UNAVAILABLE, "draining")
            assert cut.text == TEXT[: len(cut.text)] != ""
            assert not first.done()
            assert (await first).text == TEXT[:100]

    simulate(test, script=SLOW)


def test_an_answer_is_told_to_services_of_the_cluster_alone() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(), idempotency_key="k")
        asked = answers_pb2.ReadAnswerRequest(tenant_id="acme", request_id=answer.frames[0].started.request_id)
        for metadata, code in ({}, Code.UNAUTHENTICATED), (SIMULATED.metadata(), None):
            told = await read_all(cluster.client.stream(READ, asked, metadata=metadata))
            assert (told.error.code if told.error else None) is code
        asked.tenant_id = "other"
        told = await read_all(cluster.client.stream(READ, asked, metadata=SIMULATED.metadata()))
        assert isinstance(told.error, RpcError)
        assert told.error.code is Code.NOT_FOUND

    simulate(test)


@pytest.mark.parametrize("at_the_other", [False, True])
@pytest.mark.parametrize("released", ["at once", "late", "never"])
async def test_work_that_is_done_again_has_an_id_of_its_own(at_the_other: bool, released: str) -> None:
    """Two of one id would be one row of usage."""
    failing = True

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        if failing:
            yield STARTED
            yield tokens(1, 0, ids_of("ab"))
            yield finished(2, common_pb2.OUTCOME_INTERNAL, "broken")
            return
        async for response in say("fine")(request):
            yield response

    async with http_front(script) as front, second_router(front.cluster) as app:
        owners = front.cluster.app.kept._owners
        release = owners.release

        async def release_so(tenant: str, digest: str, revision: int) -> None:
            await asyncio.sleep(0.05 if released == "late" else 0.0)
            if released != "never":  # as where the store is away
                await release(tenant, digest, revision)

        owners.release = release_so  # type: ignore[method-assign]
        server = HttpServer(Routes(app.door))
        await server.start("127.0.0.1:0")
        body: dict[str, object] = {"model": "tiny", "prompt": "hi", "max_tokens": 32}
        headers = {"idempotency-key": "k"}
        try:
            async with client_of(front, front.server) as here, client_of(front, server) as there:
                failed = await here.post("/v1/completions", json=body, headers=headers)
                assert failed.status_code == 500
                failing = False
                client = there if at_the_other else here
                again = await client.post("/v1/completions", json=body, headers=headers)
                if at_the_other and released == "never":
                    assert (again.status_code, again.json()["error"]["code"]) == (409, "answered_elsewhere")
                    assert again.headers["retry-after"] == "1"
                    again = await client.post("/v1/completions", json=body, headers=headers)
                assert (again.status_code, again.json()["choices"][0]["text"]) == (200, "fine")
                ids = [each.headers["x-manylora-request-id"] for each in (failed, again)]
                assert again.json()["id"].endswith(ids[1])
                await until(lambda: len(cluster_ids(front.cluster)) == 2)
                assert sorted(cluster_ids(front.cluster)) == sorted(ids)
        finally:
            await server.stop(0.0)


def cluster_ids(cluster: RouterCluster) -> list[str]:
    """Of all requests, as they were charged."""
    return [request_id for request_id, _ in cluster.scheduler.settled]


async def test_an_id_that_was_found_is_never_of_new_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer fails between its being found and its being joined."""

    async def found(kept: KeptAnswers, tenant: str, key: str) -> str:
        return "f" * 32

    monkeypatch.setattr(KeptAnswers, "id_of", found)
    async with http_front(say("fine")) as front, client_of(front, front.server) as client:
        body = {"model": "tiny", "prompt": "hi"}
        refused = await client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "answered_elsewhere")
        assert executed(front.cluster) == len(front.cluster.app.kept) == 0
        assert (await front.cluster.store.list(keys.ANSWERS)).kvs == ()
        monkeypatch.undo()
        again = await client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
        assert again.status_code == 200
        assert again.headers["x-manylora-request-id"] != "f" * 32


def client_of(front: Front, server: HttpServer) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {front.key}"}
    return httpx.AsyncClient(base_url=f"http://{server.address}", headers=headers, timeout=30)


async def events(client: httpx.AsyncClient, most: int = 1000, **headers: str) -> list[str]:
    """The first of them; then the connection is cut."""
    found: list[str] = []
    body = {"model": "tiny", "stream": True, "prompt": "hi", "max_tokens": 100}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.stream("POST", "/v1/completions", json=body, headers=sent) as answer:
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


async def test_over_http_the_missing_events_come_from_the_router_that_has_them() -> None:
    async with http_front(SLOW) as front:
        cluster = front.cluster
        async with second_router(cluster) as app:
            server = HttpServer(Routes(app.door))
            await server.start("127.0.0.1:0")
            try:
                async with client_of(front, front.server) as here, client_of(front, server) as there:
                    for headers in {"x_keep_s": "5"}, {"idempotency_key": "k"}:
                        before = executed(cluster)
                        head = await events(here, 3, **headers)
                        tail = await events(there, last_event_id=id_of(head[-1]))
                        whole = await events(here, last_event_id=id_of(head[0]).partition("-")[0] + "-0")
                        assert head + tail == whole
                        assert executed(cluster) == before + 1
                    assert await events(there, idempotency_key="k") == whole, "with the same ids"
                    unknown = {"last-event-id": "f" * 32 + "-1"}
                    body = {"model": "tiny", "stream": True, "prompt": "hi"}
                    lost = await there.post("/v1/completions", json=body, headers=unknown)
                    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "last-event-id")
                    whole = await events(there, idempotency_key="gone")
            finally:
                await server.stop(0.0)
        await until(lambda: len(cluster.app.directory.routers) == 1)
        async with client_of(front, front.server) as here:
            body = {"model": "tiny", "stream": True, "prompt": "hi", "max_tokens": 100}
            for headers, status in ({"last-event-id": id_of(whole[0])}, 404), ({"idempotency-key": "gone"}, 409):
                refused = await here.post("/v1/completions", json=body, headers=headers)
                assert refused.status_code == status
