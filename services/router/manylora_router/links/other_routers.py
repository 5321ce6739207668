"""The other routers of the cluster, as one of them asks them: in its caller's name, with what its caller showed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf.message import Message
from manylora_shared.errors import Code, RpcError
from manylora_shared.metadata import CALLER_KEY, TENANT_KEY
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY
from manylora_shared.transport.base import Method, Transport

from manylora_router.links.directory import Directory

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 1.0
_STREAM_TIMEOUT_S = 120.0
_SHOWN = (AUTHORIZATION_KEY, TENANT_KEY, CALLER_KEY)


class OtherRouters:
    def __init__(self, *, router_id: str, directory: Directory, transport: Transport) -> None:
        self.router_id = router_id
        self._directory = directory
        self._transport = transport

    async def ask(self, method: Method, request: Message, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Answers by router id; an RpcError, which is logged unless it is NOT_FOUND, where there is none."""
        others, shown = self._others(), _shown(metadata)
        asked = (self._ask(address, method, request, shown) for address in others.values())
        return dict(zip(others, await asyncio.gather(*asked), strict=True))

    async def streams(
        self, method: Method, request: Message, metadata: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, Any]]:
        """Each router's answers, with its id, one router after the other; an RpcError where its stream ends by one."""
        for router_id, address in self._others().items():
            channel = self._transport.connect(address)
            try:
                stream = channel.stream(method, request, timeout=_STREAM_TIMEOUT_S, metadata=_shown(metadata))
                try:
                    while (answer := await stream.read()) is not None:
                        yield router_id, answer
                finally:
                    stream.cancel()
            except RpcError as e:
                _LOG.warning("a router did not answer another", extra=fields(address=address, error=str(e)))
                yield router_id, e
            finally:
                await channel.close()

    def _others(self) -> dict[str, str]:
        """Addresses by id."""
        records = sorted(self._directory.routers.items())
        return {router_id: record.address for router_id, record in records if router_id != self.router_id}

    async def _ask(self, address: str, method: Method, request: Message, shown: Mapping[str, str]) -> Any:
        channel = self._transport.connect(address)
        try:
            return await channel.call(method, request, timeout=_TIMEOUT_S, metadata=shown)
        except RpcError as e:
            if e.code is not Code.NOT_FOUND:
                more = fields(address=address, method=method.path, error=str(e))
                _LOG.warning("a router did not answer another", extra=more)
            return e
        finally:
            await channel.close()


def _shown(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: metadata[key] for key in _SHOWN if key in metadata}
