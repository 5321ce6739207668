"""Requests to their answers: whole, or as events while they come. Knows the form of neither endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any, Protocol

from manylora.v1 import common_pb2
from manylora_shared.errors import Overloaded
from manylora_shared.ids import DEFAULT_POOL, QosClass
from manylora_shared.metadata import ADAPTER_KEY
from manylora_shared.transport.handling import REFUSAL_DELAY_S
from manylora_shared.transport.places import Pace, Places

from manylora_router.dialect.dialect import Dialect
from manylora_router.front.feedback import FeedbackDesk
from manylora_router.front.generation import Outliving, generate
from manylora_router.front.http import errors
from manylora_router.front.http.api import outliving
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.exchange import Exchange, encoded
from manylora_router.front.http.fields import Fields
from manylora_router.front.intake import Intake
from manylora_router.guard.admission import RequestInput
from manylora_router.guard.pools import NO_NAMES, ModelNames
from manylora_router.links.callers import Callers
from manylora_router.links.entrance import Entrance
from manylora_router.links.loop_turns import Flow
from manylora_router.links.moments import Moments
from manylora_router.request.call import Calls
from manylora_router.request.frames import ChoiceEnd, Delta, Finished, Frame, Started
from manylora_router.text.service import TextService
from manylora_router.text.texts import Texts

_MARK = "\0text"
_QUEUED_FRAMES = 64
_SCORES_AT_ONCE = 2048  # put into words in one turn of the event loop
NOTHING: Mapping[str, Any] = MappingProxyType({})
_FINGERPRINT_CHARS = 10

_FINISH_REASONS: Mapping[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Door:
    """What the handlers share."""

    intake: Intake
    callers: Callers
    entrance: Entrance
    calls: Calls
    outliving: Outliving
    feedback: FeedbackDesk
    text: TextService  # of the pool; `at` gives another's door
    dialect: Dialect
    texts: Texts
    dialect_of: Callable[[TextService], Dialect]
    admin: Mapping[str, Callable[..., Any]]  # AdminService's handlers
    places: Places
    pace: Pace  # of large bodies
    getrandbits: Callable[[int], int]
    now_unix_s: Callable[[], float]
    router_id: str
    console: Moments | None  # what its pages ask; None: there is none
    pool: str = DEFAULT_POOL
    names: ModelNames = NO_NAMES

    async def at(self, exchange: Exchange, fields: Fields) -> Door:
        """For what a body's `model` and the caller's headers name."""
        tenant, model = exchange.tenant, fields.peek("model")
        names = self.intake.names(tenant)
        base, adapter = names.split(model if isinstance(model, str) else "")
        pool = self.intake.pool_of(tenant, base, adapter or exchange.headers.get(ADAPTER_KEY, ""))
        if pool == DEFAULT_POOL:
            return replace(self, names=names)
        text = await self.texts.of(pool)
        return replace(self, names=names, pool=pool, text=text, dialect=self.dialect_of(text))

    @property
    def max_context_tokens(self) -> int:
        """0 while no worker was ever seen."""
        model = self.intake.model_of(self.pool)
        return model.limits.max_context_tokens if model is not None else 0

    @property
    def longest_context_tokens(self) -> int:
        """With any adapter. 0 while no worker was ever seen."""
        model = self.intake.model_of(self.pool)
        return model.limits.longest if model is not None else 0

    @property
    def fingerprint(self) -> str:
        """Empty while no worker was ever seen."""
        model = self.intake.model_of(self.pool)
        return model.fingerprint if model is not None else ""

    async def read(self, exchange: Exchange, qos_class: QosClass | None = None) -> Fields:
        """The body's fields."""
        flow = (exchange.tenant, qos_class)
        fields = Fields(await exchange.json(lambda cost: self._large(flow, cost)))
        await outliving.name(exchange, self.outliving.kept)
        return fields

    @asynccontextmanager
    async def _large(self, flow: Flow, cost: int) -> AsyncIterator[None]:
        try:
            await self.pace.wait(flow[0], cost)
        except Overloaded:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise
        async with self.intake.text_turn(flow, cost):
            yield


@dataclass
class Choice:
    """All of it, or what one event tells of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    offset: int = 0  # characters before `text`
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string, or the stop token of the request's own

    def finish(self, end: ChoiceEnd, stop_token_ids: Collection[int]) -> None:
        self.finish_reason = _FINISH_REASONS.get(end.finish_reason)
        own_token = end.stop_token_id if end.stop_token_id in stop_token_ids else None
        self.stop_reason = end.stop_string if end.stop_string is not None else own_token


@dataclass
class Opened:
    """What is known of a prompt before its answer's first token."""

    token_ids: Sequence[int] = ()
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)  # of those from the second on


class Shape(Protocol):
    """One endpoint's answers."""

    id_prefix: str
    whole_name: str
    event_name: str
    is_plain: bool  # events may be made without it, of text alone

    def offset(self, index: int) -> int:
        """Characters of a choice before its output."""

    def document(self, prompt: Opened) -> dict[str, Any]:
        """What is told of the first prompt beside the choices."""

    def choice(self, index: int, choice: Choice, prompt: Opened) -> dict[str, Any]: ...

    def piece(self, index: int, piece: Choice) -> dict[str, Any] | None:
        """A choice of one event; None: there is nothing to tell."""

    def opening(self, index: int, prompt: Opened) -> dict[str, Any] | None:
        """What an event tells of a choice before its first text; None: nothing."""


def resumed_part(resumed: int) -> dict[str, int]:
    """What a usage tells besides, where another worker went on with the answer."""
    return {"resumed": resumed} if resumed else {}


@dataclass
class _Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumed: int = 0

    def add(self, usage: common_pb2.Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_prompt_tokens
        self.resumed += usage.resumed

    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **resumed_part(self.resumed),
        }


class Answering:
    """One call of an endpoint: one request a prompt, all of one form."""

    def __init__(self, door: Door, exchange: Exchange, requests: Sequence[RequestInput], form: Form, shape: Shape):
        self._door = door
        self._exchange = exchange
        self._requests = outliving.asked(exchange, requests, is_stream=form.is_stream)
        self._form = form
        self._shape = shape
        self._n = requests[0].n
        self._common = {
            "id": shape.id_prefix + exchange.request_id,
            "object": shape.event_name if form.is_stream else shape.whole_name,
            "created": int(door.now_unix_s()),
            "model": form.model,
            "system_fingerprint": f"fp_{door.fingerprint[:_FINGERPRINT_CHARS]}",
        }

    async def run(self) -> None:
        async with self._exchange.watched(is_streaming=self._form.is_stream):
            await (self._stream() if self._form.is_stream else self._collect())

    async def _collect(self) -> None:
        choices = [Choice(offset=self._shape.offset(i)) for i in range(self._n * len(self._requests))]
        prompts = [Opened() for _ in self._requests]
        headers: dict[str, str] = {}
        usage = _Usage()
        async with aclosing(self._frames()) as frames:
            async for number, frame in frames:
                if frame.started is not None:
                    prompts[number].token_ids = frame.started.prompt_token_ids
                    headers = headers if number else headers_of(frame.started)
                prompts[number].logprobs += frame.prompt_logprobs
                if (delta := frame.delta) is not None and self._form.has_output:
                    _extend(choices[number * self._n + delta.choice], delta)
                if frame.finished is not None:
                    usage.add(frame.finished.usage)
                    for end in frame.finished.choices:
                        self._end(choices[number * self._n + end.choice], end)

        def body() -> bytes:
            told = [self._shape.choice(i, choice, prompts[i // self._n]) for i, choice in enumerate(choices)]
            document = {**self._common, "choices": told, "usage": usage.document(), **self._shape.document(prompts[0])}
            return encoded(document)

        size = sum(len(prompt.logprobs) for prompt in prompts)
        await self._exchange.answer_bytes(await self._made(body, size), "application/json", headers=headers)

    async def _stream(self) -> None:
        events = _Events(self._form, self._shape, self._common)
        usage = _Usage()
        prompts: dict[int, Opened] = {}  # whose answers are not opened
        is_scored = self._requests[0].sampling.prompt_logprobs is not None
        async with aclosing(self._frames()) as frames:
            async for number, frame in frames:
                base = number * self._n
                told: list[bytes] = []
                if (started := frame.started) is not None:
                    await self._exchange.begin_events(headers_of(started))
                    usage.prompt_tokens += len(started.prompt_token_ids)
                    prompts[number] = Opened(started.prompt_token_ids)
                if (prompt := prompts.get(number)) is not None:
                    prompt.logprobs += frame.prompt_logprobs
                    if not is_scored or frame.delta is not None or frame.finished is not None:
                        del prompts[number]
                        told.append(await self._openings(events, base, prompt, usage))
                if (delta := frame.delta) is not None:
                    usage.completion_tokens += len(delta.token_ids)
                    if self._form.has_output:
                        told.append(events.delta(base + delta.choice, delta, usage))
                if frame.finished is not None and frame.finished.outcome == common_pb2.OUTCOME_COMPLETED:
                    usage.cached_tokens += frame.finished.usage.cached_prompt_tokens
                    usage.resumed += frame.finished.usage.resumed
                    told += self._ends(events, base, frame.finished, usage)
                if data := b"".join(told):
                    await self._exchange.write(data)
        last = events.usage(usage) if self._form.has_usage else b""
        await self._exchange.write(last + b"data: [DONE]\n\n")
        await self._exchange.end()

    async def _openings(self, events: _Events, base: int, prompt: Opened, usage: _Usage) -> bytes:
        def made() -> bytes:
            return b"".join(events.opening(base + i, prompt, usage) for i in range(self._n))

        return await self._made(made, len(prompt.logprobs))

    async def _made(self, make: Callable[[], bytes], num_scored: int) -> bytes:
        """num_scored: of prompts, whose log-probabilities are told: many are put into words off the event loop."""
        request = self._requests[0]
        size = num_scored * (1 + (request.sampling.prompt_logprobs or 0)) * self._n
        if size <= _SCORES_AT_ONCE:
            return make()
        async with self._door.intake.text_turn((self._exchange.tenant, request.qos_class), size):
            return await asyncio.to_thread(make)

    def _ends(self, events: _Events, base: int, finished: Finished, usage: _Usage) -> list[bytes]:
        told = []
        for end in finished.choices:
            piece = Choice()
            self._end(piece, end)
            told.append(events.piece(base + end.choice, piece, usage))
        return told

    def _end(self, choice: Choice, end: ChoiceEnd) -> None:
        choice.finish(end, self._requests[0].stop_token_ids)
        if not self._form.has_output:
            choice.finish_reason, choice.stop_reason = "length", None
        elif self._form.includes_stop and end.stop_string is not None:
            choice.text += end.stop_string

    def _generate(self, request: RequestInput) -> AsyncGenerator[Frame]:
        door = self._door
        return generate(request, intake=door.intake, calls=door.calls, outliving=door.outliving)

    async def _frames(self) -> AsyncGenerator[tuple[int, Frame]]:
        """Each with its prompt's number. Close it. Raises the error of whichever fails first."""
        if len(self._requests) == 1:
            async with aclosing(self._generate(self._requests[0])) as frames:
                async for frame in frames:
                    yield 0, frame
            return
        queue: asyncio.Queue[tuple[int, Frame] | Exception | None] = asyncio.Queue(_QUEUED_FRAMES)

        async def run(number: int, request: RequestInput) -> None:
            try:
                async with aclosing(self._generate(request)) as frames:
                    async for frame in frames:
                        await queue.put((number, frame))
            except Exception as e:
                await queue.put(e)
            else:
                await queue.put(None)

        tasks = [asyncio.create_task(run(i, request)) for i, request in enumerate(self._requests)]
        left = len(tasks)
        try:
            while left:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Events:
    """Events of one stream. Those with nothing but text are made of bytes that stand ready."""

    def __init__(self, form: Form, shape: Shape, common: Mapping[str, Any]) -> None:
        self._form = form
        self._shape = shape
        self._common = common
        self._is_plain = shape.is_plain and not (form.has_logprobs or form.has_token_ids or form.has_usage_always)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, int] = {}

    def delta(self, index: int, delta: Delta, usage: _Usage) -> bytes:
        if self._is_plain:
            if not delta.text:
                return b""
            before, after = self._around.get(index) or self._prepare(index)
            return before + encode_basestring_ascii(delta.text).encode() + after
        offset = self._offsets.get(index, self._shape.offset(index))
        self._offsets[index] = offset + len(delta.text)
        piece = Choice(delta.text, list(delta.token_ids), list(delta.logprobs), offset)
        return self.piece(index, piece, usage)

    def piece(self, index: int, piece: Choice, usage: _Usage) -> bytes:
        told = self._shape.piece(index, piece)
        return b"" if told is None else self._event([told], usage if self._form.has_usage_always else None)

    def opening(self, index: int, prompt: Opened, usage: _Usage) -> bytes:
        opening = self._shape.opening(index, prompt)
        if opening is None:
            return b""
        more = self._shape.document(prompt)
        return self._event([opening], usage if self._form.has_usage_always else None, more)

    def usage(self, usage: _Usage) -> bytes:
        return self._event([], usage)

    def _event(self, choices: list[dict[str, Any]], usage: _Usage | None, more: Mapping[str, Any] = NOTHING) -> bytes:
        event = {**self._common, "choices": choices, **more}
        if self._form.has_usage:
            event["usage"] = usage.document() if usage is not None else None
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"

    def _prepare(self, index: int) -> tuple[bytes, bytes]:
        told = self._shape.piece(index, Choice(_MARK))
        assert told is not None, "a plain shape tells every text"
        before, _, after = self._event([told], None).partition(json.dumps(_MARK).encode())
        self._around[index] = before, after
        return before, after


def _extend(choice: Choice, delta: Delta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.logprobs += delta.logprobs


def headers_of(started: Started) -> dict[str, str]:
    told: dict[str, str] = {}
    if started.adapter_version:
        told["x-adapter"] = started.adapter
        told["x-adapter-version"] = started.adapter_version
    if (degraded := started.degraded) is not None:
        told["x-degraded"] = (
            f"max_tokens={degraded.max_tokens}, asked_max_tokens={degraded.asked_max_tokens}, "
            f"overload_level={degraded.overload_level}"
            + (f", pool={degraded.pool}, asked_pool={degraded.asked_pool}" if degraded.pool else "")
            + (", not_streamed" if degraded.not_streamed else "")
        )
    return told | errors.rate_limits(started.levels)
