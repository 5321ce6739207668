"""One HTTP connection under limits that uvicorn has none of: size and time of headers, connections, a reader that
stopped.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from manylora_shared.errors import InvalidRequest, Overloaded
from manylora_shared.transport.connections import MAX_STRANGERS, STRANGER, SWEEP_S, fair_level
from manylora_shared.transport.places import Places
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from manylora_router.front.http.errors import ErrorForm

MAX_HEADER_BYTES = 16 * 1024
HEADER_TIMEOUT_S = 10.0
LINGER_S = 5.0  # after an answer, for the rest of a body that was not read
_TOO_LONG = "the headers are too long"
MAX_PIPELINED = 32  # requests behind the one that is answered; each takes 3 KiB, and its bytes thirty
MAX_CONNECTIONS = 8192
KEPT_CONNECTIONS = 512  # of these, for peers that have few


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, places: Places, **kwargs: Any) -> None:
        """`places`: of connections, by the peer's host."""
        super().__init__(*args, **kwargs)
        self._places = places
        self._peer: str | None = None
        self.owner = STRANGER  # whose key came over it last
        self.made_at = 0.0
        self._bare_bytes = 0  # without a body in them: of headers, trailers, chunks' extensions
        self._is_in_headers = True
        self._has_brought = False  # some of a body, or a request's end, by the last bytes
        self._expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = str((self.client or ("",))[0])
        try:
            self._places.enter(peer)
        except Overloaded:
            transport.abort()
            return
        self._peer = peer
        self.made_at = self.loop.time()
        self._expire_in(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expiry()
        if self._peer is not None:
            self._places.leave(self._peer)
            self._peer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers and self._expiry is None:
            self._expire_in(HEADER_TIMEOUT_S)
        self._has_brought = False
        super().data_received(data)
        if self._has_brought or self.transport.is_closing():
            return
        self._bare_bytes += len(data)
        if self._bare_bytes > MAX_HEADER_BYTES:
            if self._is_in_headers:
                self.send_400_response(_TOO_LONG)
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"].update(abort=self.transport.abort, vouch=self.vouch)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests at once")  # the parser's error: the rest of the bytes is not looked at
        self._is_in_headers = False
        self._bare_bytes = 0
        self._stop_expiry()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            raise ValueError(_TOO_LONG)  # the parser's error: answered by 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_brought = True
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_headers = self._has_brought = True
        self._stop_expiry()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_in_headers and self.cycle.response_complete:
            # Nobody reads the rest of this body, but who sends it is to read the answer.
            self._expire_in(LINGER_S)

    def cut(self) -> None:
        self.transport.abort()

    def vouch(self, owner: str) -> None:
        self.owner = owner

    def send_400_response(self, msg: str) -> None:
        """In OpenAI's form, with a word to those who speak another protocol."""
        if self.transport.is_closing():
            return
        takes = "HTTP/1.1" if self.scheme == "https" else "HTTP/1.1 without TLS"
        refusal = InvalidRequest(f"{msg}: this port takes {takes}; gRPC has a port of its own")
        body = json.dumps(ErrorForm().document(refusal, {})).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for its reader
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _expire_in(self, seconds: float) -> None:
        self._stop_expiry()
        self._expiry = self.loop.call_later(seconds, self.transport.abort)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class Connection(Protocol):
    owner: str
    made_at: float

    def cut(self) -> None: ...


def beyond(
    connections: Iterable[Connection], capacity: int, now: float, *, max_strangers: int = MAX_STRANGERS
) -> list[Connection]:
    """Those to cut off. Of strangers the oldest go, that had the time to show a key; of a key's the newest."""
    held: defaultdict[str, list[Connection]] = defaultdict(list)
    for each in sorted(connections, key=lambda each: each.made_at):
        held[each.owner].append(each)
    strangers = held.pop(STRANGER, [])
    found = [each for each in strangers if now - each.made_at > SWEEP_S][: max(0, len(strangers) - max_strangers)]
    level = fair_level(map(len, held.values()), capacity - min(len(strangers), max_strangers))
    return found if level is None else found + [each for owned in held.values() for each in owned[level:]]
