"""Answers that another router keeps: read from there for a caller here, and told from here to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from manylora.v1 import answers_pb2, inference_pb2
from manylora_shared.coordination.peers import PeerSecret, guarded
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import Code, ManyloraError, NotFound, RpcError, ServiceUnavailable
from manylora_shared.transport.base import Channel, ServerCall, Service, Stream, Transport, methods_of
from manylora_shared.transport.places import Places

from manylora_router.front.frame_messages import frame_of, message_of
from manylora_router.front.intake import Intake
from manylora_router.front.kept_answers import KeptAnswers
from manylora_router.guard.admission import RequestInput
from manylora_router.links.directory import Directory
from manylora_router.request.call import draining
from manylora_router.request.frames import Frame

ASKING = 64  # calls that seek their answer at the other routers
_ASKING_KEPT = 16
_FOUND_S = 2.0  # for a router to say whether it has an answer
_LOOK_S = 1.0  # so often one that says nothing is looked for in the store
_SERVICE = answers_pb2.DESCRIPTOR.services_by_name["AnswerService"]
_READ = methods_of(_SERVICE)["ReadAnswer"]


@dataclass(frozen=True)
class Asked:
    message: answers_pb2.ReadAnswerRequest
    is_resumable: bool


class FarAnswer:
    """`close` it."""

    def __init__(self, channel: Channel, stream: Stream, router_id: str, is_there: Callable[[], bool]) -> None:
        self._channel = channel
        self._stream = stream
        self._router_id = router_id
        self._is_there = is_there
        self.when_closed: Callable[[], None] = lambda: None
        self._is_handed_over = False
        self._reading: asyncio.Future[answers_pb2.ReadAnswerResponse | None] | None = None

    async def found(self) -> None:
        """Raises NotFound, ServiceUnavailable where the router does not answer, or why it may not be read."""
        try:
            async with asyncio.timeout(_FOUND_S):
                await self._next()
        except TimeoutError:
            raise self._lost() from None

    async def read(self) -> AsyncGenerator[Frame]:
        """Raises what the answer ended with, or ServiceUnavailable where its router is lost."""
        while (message := await self._next()) is not None:
            yield frame_of(message.frame, message.prompt.ids)

    def hand_over(self) -> None:
        """Its caller goes on at another router, as this one stops."""
        self._is_handed_over = True
        self._stream.cancel()

    async def close(self) -> None:
        self.when_closed()
        self._stream.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._channel.close()

    async def _next(self) -> answers_pb2.ReadAnswerResponse | None:
        self._reading = reading = asyncio.ensure_future(self._stream.read())
        while not (await asyncio.wait([reading], timeout=_LOOK_S))[0]:
            if not self._is_there():
                raise self._lost()
        try:
            message: answers_pb2.ReadAnswerResponse | None = reading.result()
            return message
        except RpcError as e:
            raise self._told(e) from None

    def _told(self, error: RpcError) -> ManyloraError:
        if self._is_handed_over:
            return draining()
        kind = _KINDS.get(error.label)
        if kind is None or kind.code is not error.code:
            return self._lost() if error.code in (Code.UNAVAILABLE, Code.CANCELLED) else error
        return kind(
            error.message, violations=error.violations, retry_after_s=error.retry_after_s, breaches=error.breaches
        )

    def _lost(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"router {self._router_id}, which has this answer, is not reached", retry_after_s=1.0)


class FarAnswers:
    def __init__(self, router_id: str, directory: Directory, peers: Transport) -> None:
        self._router_id = router_id
        self._directory = directory
        self._peers = peers
        self._asking = Places(ASKING, kept=_ASKING_KEPT, few=2)
        self._resumable: dict[FarAnswer, None] = {}

    def hand_over(self) -> None:
        """What is read for callers who can go on elsewhere."""
        for answer in list(self._resumable):
            answer.hand_over()

    async def open(self, router: RouterRecord, asked: Asked) -> FarAnswer:
        """Raises as FarAnswer.found."""
        channel = self._peers.connect(router.address)

        def is_there() -> bool:
            known = self._directory.routers.get(router.router_id)
            return known is not None and known.started_unix_s == router.started_unix_s

        answer = FarAnswer(channel, channel.stream(_READ, asked.message), router.router_id, is_there)
        if asked.is_resumable:
            self._resumable[answer] = None
            answer.when_closed = partial(self._resumable.pop, answer, None)
        try:
            await answer.found()
        except BaseException:
            await answer.close()
            raise
        return answer

    async def seek(self, asked: Asked, field: str) -> FarAnswer:
        """At all other routers, by the id that the caller gave in that field.

        Raises NotFound, ServiceUnavailable where a router that may have it does not answer, or Overloaded where the
        tenant seeks too many at once.
        """
        silent: list[str] = []
        with self._asking.held(f"tenant {asked.message.tenant_id} for other routers' answers"):
            for router_id, router in sorted(self._directory.routers.items()):
                if router_id == self._router_id:
                    continue
                try:
                    return await self.open(router, asked)
                except NotFound:
                    continue
                except ServiceUnavailable:
                    silent.append(router_id)
        if silent:
            told = f"routers that may have this answer did not answer: {', '.join(silent)}"
            raise ServiceUnavailable(told, retry_after_s=1.0)
        raise NotFound(f"{field}: no router has the answer any more")


class AnswerServicer:
    def __init__(self, intake: Intake, kept: KeptAnswers, secret: PeerSecret) -> None:
        self._intake = intake
        self._kept = kept
        self._secret = secret

    def service(self) -> Service:
        return guarded(Service(_SERVICE, {"ReadAnswer": self.read}), self._secret)

    async def read(
        self, request: answers_pb2.ReadAnswerRequest, call: ServerCall
    ) -> AsyncIterator[answers_pb2.ReadAnswerResponse]:
        tenant = request.tenant_id
        asked = RequestInput(
            None, idempotency_key=request.idempotency_key, part=request.part, fingerprint=request.fingerprint
        )
        answer = self._kept.find(tenant, asked, request.request_id) or await self._kept.settled(tenant, asked)
        if answer is None:
            raise NotFound("this router does not have the answer any more")
        yield answers_pb2.ReadAnswerResponse()
        emitted = [(each.token_ids, each.text_characters) for each in request.emitted]
        reading = answer.read_lacked(request.request_id, request.next_frame, emitted)
        async with aclosing(reading) as frames:
            async for frame in frames:
                await self._intake.take_turn(tenant, None)
                told = answers_pb2.ReadAnswerResponse(frame=message_of(frame))
                if frame.started is not None:
                    told.prompt.ids.extend(frame.started.prompt_token_ids)
                yield told


def asked_of(tenant: str, request: RequestInput, request_id: str) -> Asked:
    resume = request.resume
    message = answers_pb2.ReadAnswerRequest(
        tenant_id=tenant,
        request_id=request_id,
        idempotency_key=request.idempotency_key,
        part=request.part,
        fingerprint=request.fingerprint,
        next_frame=resume.next_frame if resume is not None else 0,
        emitted=[
            inference_pb2.Emitted(token_ids=token_ids, text_characters=characters)
            for token_ids, characters in (resume.emitted if resume is not None else ())
        ],
    )
    return Asked(message, request.is_resumable)


def _kinds(kind: type[ManyloraError]) -> Iterator[type[ManyloraError]]:
    for each in kind.__subclasses__():
        yield from _kinds(each)
    yield kind


# A kind that has its label from another one stands before that one, which takes its place.
_KINDS = {kind.label: kind for kind in _kinds(ManyloraError) if kind is not RpcError}
