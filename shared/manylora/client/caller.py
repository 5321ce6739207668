"""What all parts of a client call with: its credentials, deadlines and repetitions, and its words for errors."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from google.protobuf.message import Message
from manylora_shared.errors import Code, FieldViolation, RpcError
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Channel, Method, Stream
from manylora_shared.transport.grpc_transport import UNREACHABLE
from manylora_shared.transport.handling import check_size

from manylora.client.answers import RequestFailed, Result
from manylora.client.prompts import refuse
from manylora.client.retry import DEFAULT_RETRY, RetryBudget, RetryPolicy
from manylora.client.routers import RoutersChannel

DEFAULT_TIMEOUT_S = 30.0  # of calls with one answer; streams have no deadline unless one is given
REACH_S = 3.0  # for so long one of several servers is sought: a channel tries to connect once a second
_HTTP_PORT = "gRPC, which this client speaks, has another port (7070 by default)"
# By grpc's and OpenSSL's words of what failed.
_WRONG_PORTS = {
    "http1.x server": f"speaks HTTP/1.1: {_HTTP_PORT}",
    "missing selected ALPN": f"speaks HTTPS: {_HTTP_PORT}",
    "WRONG_VERSION_NUMBER": "speaks plain text, and the client TLS: leave --tls-ca (MANYLORA_TLS_CA) out",
    "CERTIFICATE_VERIFY_FAILED": "has a certificate of nobody whom --tls-ca (MANYLORA_TLS_CA) names",
    "Socket closed": "hung up: a port of TLS does so where the client speaks plain text (--tls-ca, MANYLORA_TLS_CA)",
}


class Caller:
    def __init__(self, server: str, channel: Channel, key: str, retry: RetryPolicy | None, rng: random.Random) -> None:
        self._server = server
        self.channel = channel
        self._credentials = printable(bearer(key))
        self.retry = retry
        self.budget = RetryBudget(retry or DEFAULT_RETRY)
        self.rng = rng
        self.is_closed = False

    @property
    def num_servers(self) -> int:
        return len(self.channel) if isinstance(self.channel, RoutersChannel) else 1

    def search(self, deadline: float | None, *, hops: int) -> Search:
        """`hops`: how often the next attempt goes to another server at once."""
        is_one_of_several = self.num_servers > 1 and self.retry is not None
        return Search(hops if is_one_of_several else 0, is_one_of_several, deadline, self.rng)

    def check_open(self) -> None:
        if self.is_closed:
            raise closed()

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout_s: float | None,
        metadata: Mapping[str, str] | None = None,
        hops: int = 0,
    ) -> Stream:
        """`hops`: to the router so many behind the present one, where there are several."""
        channel = self.channel
        if hops and isinstance(channel, RoutersChannel):
            channel = channel.behind(hops)
        if request is not None:
            check_size(request)
        return channel.stream(method, request, timeout=timeout_s, metadata={**(metadata or {}), **self._credentials})

    async def answers(self, method: Method, request: Message, *, timeout_s: float | None) -> AsyncIterator[Any]:
        """A stream's messages. Raises RequestFailed."""
        stream = self.stream(method, request, timeout_s=timeout_s)
        try:
            while (answer := await stream.read()) is not None:
                yield answer
        except RpcError as error:
            raise self.failed(error) from None
        finally:
            stream.cancel()

    async def wait_to_repeat(
        self, error: RpcError, attempt: int, deadline: float | None, *, repeatable: bool = True
    ) -> bool:
        """False (at once) where there shall be no next attempt."""
        delay_s = self.retry.delay_s(error, attempt, self.rng, repeatable=repeatable) if self.retry else None
        if delay_s is None or (deadline is not None and time.monotonic() + delay_s >= deadline):
            return False
        if not self.budget.spend():
            return False
        await asyncio.sleep(delay_s)
        return True

    async def upload(self, method: Method, messages: Iterable[Message], *, timeout_s: float) -> Any:
        """The one answer to a stream of messages, none of which is sent twice. Raises RequestFailed."""
        self.check_open()
        stream = self.stream(method, timeout_s=timeout_s)
        try:
            for message in messages:
                await stream.write(message)
            await stream.close_send()
            answer = await stream.read()
        except RpcError as error:
            raise self.failed(error) from None
        finally:
            stream.cancel()
        if answer is None:
            raise RequestFailed(Code.INTERNAL.name, "the server ended the upload without an answer")
        return answer

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout_s: float | None,
        metadata: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> Any:
        self.check_open()
        deadline = deadline_of(timeout_s)
        sent = {**(metadata or {}), **self._credentials}
        self.budget.on_call()
        attempt, search = 1, self.search(deadline, hops=0)
        while True:
            try:
                check_size(request)
                return await self.channel.call(method, request, timeout=left_s_of(deadline), metadata=sent)
            except RpcError as error:
                if await search.goes_on(error):
                    continue
                if not await self.wait_to_repeat(error, attempt, deadline, repeatable=repeatable):
                    raise self.failed(error) from None
            attempt += 1

    def failed(self, error: RpcError, result: Result | None = None) -> RequestFailed:
        failed = RequestFailed.of(error, result)
        if error.label != UNREACHABLE:
            return failed
        told = next((words for sign, words in _WRONG_PORTS.items() if sign in error.message), "")
        message = f"{self._server} {told}"
        if not told:
            message = f"nothing answers at {self._server}; is `manylora up` running? ({error.message})"
        return RequestFailed(failed.code, message, reason=failed.reason, result=result)


class Search:
    """For one of several servers that takes a call. That is no repetition: nobody has worked for it."""

    def __init__(self, hops: int, is_one_of_several: bool, deadline: float | None, rng: random.Random) -> None:
        self._hops = hops
        self._until = math.inf if deadline is None else deadline
        self._is_one_of_several = is_one_of_several
        self._rng = rng
        self._tries = 0

    async def goes_on(self, error: RpcError) -> bool:
        """False (at once) where it is not sought further."""
        if not (self._is_one_of_several and is_untaken(error)):
            return False
        now = time.monotonic()
        if not self._tries:
            self._until = min(self._until, now + REACH_S)
        delay_s = DEFAULT_RETRY.going_on_s(max(0, self._tries - self._hops + 1), self._rng)
        if now + delay_s >= self._until:
            return False
        self._tries += 1
        await asyncio.sleep(delay_s)
        return True


def is_untaken(error: RpcError) -> bool:
    """The server was not reached, or has refused the call as it stops."""
    return error.code is Code.UNAVAILABLE and error.label in (UNREACHABLE, "draining")


def deadline_of(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def left_s_of(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def closed() -> RequestFailed:
    return RequestFailed(Code.FAILED_PRECONDITION.name, "this client is closed")


def printable(sent: dict[str, str]) -> dict[str, str]:
    # the message repeats no value
    violations = [
        FieldViolation(key, "must be printable ASCII")
        for key, value in sent.items()
        if not (isinstance(value, str) and value.isascii() and value.isprintable())
    ]
    refuse(violations)
    return sent
