"""One HTTP request and its answer: headers, the bounded body, and what is written back.

Owns whether the answer has begun, and who is there to read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from manylora_shared.errors import HttpError, InvalidRequest, ManyloraError, SlowReader, shown
from manylora_shared.metadata import ADAPTER_KEY, CLASS_KEY, IDEMPOTENCY_KEY, KEEP_KEY, LAST_EVENT_ID
from manylora_shared.transport.handling import MAX_MESSAGE_BYTES
from manylora_shared.transport.unparsed import LARGE_BYTES

from manylora_router.front.http import errors
from manylora_router.front.http.bodies import BodyRoom, cost_of
from manylora_router.front.http.fields import is_shallow

BODY_TIMEOUT_S = 30.0
SLOW_READER_S = 15.0
MAX_BODY_DEPTH = 200  # far from where writers of JSON give up, whichever thread's stack they have
KEEP_ALIVE_S = 5.0  # an answer that has nothing to say for so long says that it lives

_OUTLIVING = (IDEMPOTENCY_KEY, KEEP_KEY, LAST_EVENT_ID)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyTooLarge(InvalidRequest):
    own_http = HttpError(413, "invalid_request_error")


class BodyEncoded(InvalidRequest):
    own_http = HttpError(415, "invalid_request_error")


class BodyLate(InvalidRequest):
    own_http = HttpError(408, "timeout_error")


class EventIds:
    """Numbers a stream's events from 1, and leaves out those that the caller has."""

    def __init__(self, request_id: str, known: int) -> None:
        self._request_id = request_id
        self._known = known
        self._count = 0

    def of(self, data: bytes) -> bytes:
        """Whole events, with their ids; comments have none."""
        told: list[bytes] = []
        for event in data.split(b"\n\n")[:-1]:
            if not event.startswith(b":"):
                self._count += 1
                if self._count <= self._known:
                    continue
                event = b"id: %s-%d\n%s" % (self._request_id.encode(), self._count, event)
            told.append(event + b"\n\n")
        return b"".join(told)


class Gone(Exception):
    """Nobody is there to read the answer."""


class Exchange:
    """Used by one task."""

    def __init__(self, scope: Message, receive: Receive, send: Send, request_id: str, room: BodyRoom) -> None:
        self.request_id = request_id
        self.joins = False  # that id is another call's, whose answer this one is to get
        self.tenant = ""  # that the caller may ask for; empty: not known
        self._room = room
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.parameters: Mapping[str, str] = scope.get("path_params", {})
        self.peer = str((scope.get("client") or ("",))[0])
        self.headers = _headers(scope["headers"])
        self.event_ids: EventIds | None = None  # of a stream that its caller may come back to
        self.has_begun = False
        self.has_ended = False
        self.is_gone = False
        self.names: errors.Names = {}
        self.form = errors.ErrorForm()
        self.vouch: Callable[[str], None] = scope.get("state", {}).get("vouch", lambda owner: None)
        self._abort: Callable[[], None] = scope.get("state", {}).get("abort", lambda: None)
        self._receive = receive
        self._send = send
        self._digest = b""  # of the body
        self._is_read = False
        self._written_at = 0.0

    # The body

    async def json(self, turn: Callable[[int], AbstractAsyncContextManager[None]]) -> dict[str, Any]:
        """`turn`: of a large body that costs as so many bytes of text. Raises InvalidRequest, Overloaded, or Gone."""
        with self._room.hold(self.tenant) as take:
            data = await self._body(take)
            if any(key in self.headers for key in _OUTLIVING):
                self._digest = hashlib.sha256(data).digest()
            if len(data) <= LARGE_BYTES:
                document = _parse(data)
            else:
                async with turn(cost_of(data)):
                    document = await asyncio.to_thread(_parse, data)
        if not isinstance(document, dict):
            raise InvalidRequest.of("body", "must be a JSON object")
        return document

    def fingerprint(self) -> bytes:
        """Of what is asked, where a header says that it may be asked again."""
        named = "\0".join([self.path, *(self.headers.get(key, "") for key in (ADAPTER_KEY, CLASS_KEY))])
        return hashlib.sha256(self._digest + named.encode()).digest()

    async def _body(self, take: Callable[[int], None]) -> bytes:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise BodyEncoded.of("content-encoding", f"must be absent, not {shown(encoding)}")
        told = self.headers.get("content-length", "")
        if told.isdigit() and int(told) > MAX_MESSAGE_BYTES:
            raise _too_large()
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not self._is_read:
                    part = await self._read()
                    if len(found) + len(part) > MAX_MESSAGE_BYTES:
                        raise _too_large()
                    take(len(part))
                    found += part
        except TimeoutError:
            raise BodyLate.of("body", f"was not there after {BODY_TIMEOUT_S:g} seconds") from None
        return bytes(found)

    async def _read(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Gone
        self._is_read = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    # The answer

    async def answer(self, document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.answer_bytes(encoded(document), "application/json", status, headers)

    async def answer_bytes(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        told = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
        await self._begin(status, told)
        await self._write(body, more=False)

    async def refuse(self, error: ManyloraError) -> None:
        """As a status where the answer has not begun, else as the stream's last event."""
        if not self.has_begun:
            await self.answer(self.form.document(error, self.names), error.http.status, errors.headers(error))
        elif not self.has_ended:
            await self.write(self.form.event(error, self.names))
            await self.end()

    async def begin_events(self, headers: Mapping[str, str] | None = None) -> None:
        """Idempotent."""
        if not self.has_begun:
            events = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self._begin(200, {**events, "x-accel-buffering": "no", **(headers or {})})

    async def write(self, data: bytes) -> None:
        """Raises SlowReader."""
        if self.event_ids is not None:
            data = self.event_ids.of(data)
        if data:
            await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    @asynccontextmanager
    async def watched(self, *, is_streaming: bool) -> AsyncIterator[None]:
        """Cancels the task inside when the client goes away. A stream that is silent says that it lives."""
        answering = asyncio.current_task()
        assert answering is not None
        watcher = asyncio.create_task(self._watch(answering, is_streaming), name="http client")
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])

    async def _watch(self, answering: asyncio.Task[None], is_streaming: bool) -> None:
        loop = asyncio.get_running_loop()
        while not self.has_ended:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    message = await self._receive()
            except TimeoutError:
                if is_streaming and not self.has_ended and loop.time() - self._written_at >= KEEP_ALIVE_S / 2:
                    with suppress(SlowReader):  # the next call of `receive` says so
                        await self.begin_events()
                        await self.write(b": waiting\n\n")
                continue
            if message["type"] == "http.disconnect" and not self.has_ended:
                self.is_gone = True
                answering.cancel()
                return

    def abort(self) -> None:
        """Without a word: its reader does not read."""
        self._abort()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        told = {"x-request-id": _echoed(self.headers.get("x-request-id", "")) or self.request_id, **headers}
        told["x-manylora-request-id"] = self.request_id
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in told.items()]
        await self._bounded({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, data: bytes, *, more: bool) -> None:
        self.has_ended = not more
        self._written_at = asyncio.get_running_loop().time()
        await self._bounded({"type": "http.response.body", "body": data, "more_body": more})

    async def _bounded(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SLOW_READER_S):
                await self._send(message)
        except TimeoutError:
            self.abort()
            raise SlowReader(f"the answer was not read for {SLOW_READER_S:g} seconds") from None


def encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _parse(data: bytes) -> Any:
    too_deep = f"is nested too deeply: at most {MAX_BODY_DEPTH} lists and objects lie in each other"
    try:
        document = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        reason = too_deep if isinstance(e, RecursionError) else f"is not JSON: {str(e)[:120]}"
        raise InvalidRequest.of("body", reason) from None
    if data.count(b"[") + data.count(b"{") > MAX_BODY_DEPTH and not is_shallow(document, MAX_BODY_DEPTH):
        raise InvalidRequest.of("body", too_deep)
    return document


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _too_large() -> BodyTooLarge:
    return BodyTooLarge.of("body", f"has more than {MAX_MESSAGE_BYTES} bytes")


def _headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Names in lower case; the values of a repeated one joined by `, `, as in gRPC's metadata."""
    found: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


_MAX_ECHOED_CHARS = 128


def _echoed(request_id: str) -> str:
    fits = len(request_id) <= _MAX_ECHOED_CHARS and request_id.isascii() and request_id.isprintable()
    return request_id if fits else ""
