"""One router on the in-memory network for as long as the process lives, in virtual time, with the demo's tokenizer."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from manylora.demo import BASE_FOLDER
from manylora.v1 import admin_pb2, common_pb2, inference_pb2, worker_pb2
from manylora_router.front.http.routes import Routes
from manylora_router.text.constraints import ConstraintCheck
from manylora_router.text.service import HfTextService
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.constraints.grammar import refusal
from manylora_shared.errors import Code, FieldViolation, ManyloraError
from manylora_sim import loop as simulation

sys.path.append(str(Path(__file__).parents[1] / "router"))
from router_fakes import ADMIN, GENERATE, RouterCluster, finished, read_all, tokens

_T = TypeVar("_T")
_HORIZON_S = 1e9


class _InlineText(HfTextService):
    """There are no threads in virtual time."""

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        return function(*arguments)


class _InlineConstraints(ConstraintCheck):
    async def violation(self, tenant: str, constraint: Constraint) -> FieldViolation | None:
        return refusal(constraint)


async def _echo(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    """Each choice begins as the prompt does."""
    yield worker_pb2.ExecuteResponse(frame=0, started=worker_pb2.ExecuteStarted())
    ids = [*request.prompt_token_ids, 5, 9, 12][: min(8, request.max_tokens)]
    for choice in range(request.n):
        reason = common_pb2.FINISH_REASON_LENGTH
        yield tokens(choice + 1, 0, ids, choice=choice, finish=reason)
    yield finished(request.n + 1)


class _Router:
    def __init__(self) -> None:
        self.loop = simulation.SimLoop(1, limit_s=_HORIZON_S, max_events=sys.maxsize)
        self.cluster = RouterCluster(seed=1, text=_InlineText.load(BASE_FOLDER), script=_echo, delay_s=0.0001)
        self.run(self.cluster.start())
        self.cluster.app.door.intake._constraints = _InlineConstraints()
        self.key = self.run(self.cluster.put_key(scopes=("gateway", "operator")))
        self.run(asyncio.sleep(0.1))
        self.routes = Routes(self.cluster.app.door)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        asyncio.set_event_loop(self.loop)
        try:
            return self.loop.run_until_complete(work)
        finally:
            asyncio.set_event_loop(None)
            self._forget()
            assert not self.loop.errors, self.loop.errors

    def end(self) -> None:
        self.run(self.cluster.stop())
        asyncio.set_event_loop(self.loop)
        simulation._end_tasks(self.loop)
        asyncio.set_event_loop(None)
        self.loop.close()

    def _forget(self) -> None:
        """What the fakes noted of this input."""
        cluster = self.cluster
        cluster.scheduler.enqueued.clear()
        cluster.scheduler.settled.clear()
        cluster.scheduler.closed.clear()
        for worker in cluster.workers:
            worker.executed.clear()
            worker.metadata.clear()


@functools.cache
def _router() -> _Router:
    return _Router()


def end() -> None:
    """Of what `asked`, `posted` and `serves_beside` started."""
    if _router.cache_info().currsize:
        _router().end()
        _router.cache_clear()


def asked(request: inference_pb2.GenerateRequest, metadata: Mapping[str, str]) -> None:
    """Raises the answer's error; what an answer has besides is checked."""
    router = _router()

    async def ask() -> ManyloraError | None:
        stream = router.cluster.client.stream(GENERATE, request, metadata={"x-tenant-id": "acme", **metadata})
        answer = await read_all(stream)
        if answer.error is None:
            assert answer.finished.usage.prompt_tokens > 0
        await router.cluster.at_rest()
        return answer.error

    error = router.run(ask())
    if error is not None:
        raise error


def posted(path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    router = _router()
    sent: list[MutableMapping[str, Any]] = []
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return bodies.pop() if bodies else await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def post() -> None:
        given = [(b"authorization", b"Bearer " + router.key.encode()), (b"x-tenant-id", b"acme")]
        given = [each for each in given if each[0] not in dict(headers)] + headers
        scope = {"type": "http", "path": path, "method": "POST", "headers": given, "client": ("1.2.3.4", 5)}
        await router.routes(scope, receive, send)
        await router.cluster.at_rest()

    router.run(post())
    first, *rest = sent
    assert first["status"] < 500, (path, sent)
    assert rest[-1]["more_body"] is False
    if first["status"] != 200 and path.startswith("/v1/"):
        assert json.loads(rest[0]["body"])["error"]["message"]


def serves_beside(key: str, value: bytes) -> None:
    """Whatever stands at `key`, the router lists everything and serves."""
    router = _router()

    async def look() -> None:
        cluster = router.cluster
        await cluster.store.put(key, value)
        await asyncio.sleep(0.01)
        for name, request in (
            ("ListKeys", admin_pb2.ListKeysRequest()),
            ("ListTenants", admin_pb2.ListTenantsRequest()),
            ("ListAdapters", admin_pb2.ListAdaptersRequest(tenant_id="acme")),
            ("GetStatus", admin_pb2.GetStatusRequest()),
        ):
            await cluster.client.call(ADMIN[name], request)
        answer = await read_all(cluster.open(inference_pb2.GenerateRequest(text="hi", max_tokens=2)))
        assert answer.error is None or answer.error.code is not Code.INTERNAL, answer.error
        await cluster.store.delete(key)
        await asyncio.sleep(0.01)
        assert (await cluster.ask(inference_pb2.GenerateRequest(text="hi", max_tokens=2))).error is None
        await cluster.at_rest()

    router.run(look())
