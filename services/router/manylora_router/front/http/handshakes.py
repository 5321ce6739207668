"""Takes TLS connections. Owns each until its handshake has ended: the event loop's own servers tell nobody of those,
and let each take a minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

from manylora_shared.errors import InvalidRequest, Overloaded
from manylora_shared.transport.connections import STRANGER
from manylora_shared.transport.places import Places

from manylora_router.front.http.errors import ErrorForm
from manylora_router.links.loop_turns import LoopTurns

_LOG = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
_TOLD_BEHIND_BYTES = 64 * 1024
_PAUSE_S = 0.1  # where no file is left for another connection


class Handshake:
    """A connection without a protocol yet."""

    owner = STRANGER

    def __init__(self, task: asyncio.Task[None], made_at: float) -> None:
        self.made_at = made_at
        self._task = task

    def cut(self) -> None:
        self._task.cancel()


class Handshakes:
    """places: of connections, by the peer's host. One begins in a pass of the event loop, in turns of their hosts."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        places: Places,
    ) -> None:
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._places = places
        self._turns = LoopTurns()
        self._under_way: dict[asyncio.Task[None], Handshake] = {}

    def __iter__(self) -> Iterator[Handshake]:
        return iter(self._under_way.values())

    async def serve(self) -> None:
        """Until it is cancelled; then ends those under way."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(self._listening)
                except OSError as e:
                    _LOG.warning("an HTTPS connection could not be accepted: %s", e)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                task = loop.create_task(self._bring(accepted, str(address[0])), name="TLS handshake")
                self._under_way[task] = Handshake(task, loop.time())
                task.add_done_callback(self._under_way.pop)
        finally:
            self._listening.close()
            for handshake in list(self):
                handshake.cut()

    async def _bring(self, accepted: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            with self._places.held(peer):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await self._turns.take((peer, None), 1)
                    if (await _first_byte(accepted)).isalpha():
                        _tell(accepted)
                        return
                    await loop.connect_accepted_socket(
                        self._make_protocol, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                    )
        except (OSError, Overloaded):  # it speaks no TLS, is too slow, or its host has too many
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise


async def _first_byte(accepted: socket.socket) -> bytes:
    """It stays there to be read. Empty: the peer hung up."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(accepted, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK)


def _tell(accepted: socket.socket) -> None:
    """Who speaks HTTP is told in HTTP. It may be cut off before it has read that, where it sent much."""
    error = InvalidRequest("this port speaks HTTPS, and the request came in plain text: ask https://")
    body = json.dumps(ErrorForm().document(error, {})).encode()
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with accepted:
        accepted.recv(_TOLD_BEHIND_BYTES)  # what is left unread would end the connection before its answer
        accepted.send(head.encode() + b"connection: close\r\n\r\n" + body)
        accepted.shutdown(socket.SHUT_WR)
