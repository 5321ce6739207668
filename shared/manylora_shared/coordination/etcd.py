"""The coordination store over a real etcd, by its v3 gRPC API. Owns one channel an endpoint and the choice of one.

A broken watch goes on, at any endpoint, behind the last event that was handed out; where that event is compacted, or
the store does not have it (its history is another one, or it lost what it had acknowledged), it hands out a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from google.protobuf.message import Message

from manylora_shared.address import join_address, parse_address
from manylora_shared.coordination import rpc_pb2 as pb
from manylora_shared.coordination.base import (
    MAX_TXN_OPERATIONS,
    Compare,
    Delete,
    EventKind,
    KeyValue,
    LeaseExpired,
    Listing,
    Put,
    Space,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
    WatchEvent,
)
from manylora_shared.coordination.login import EtcdLogin, is_stale
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.base import Method
from manylora_shared.transport.grpc_transport import GrpcChannel, etcd_channel_options
from manylora_shared.transport.tls import Tls

CALL_TIMEOUT_S = 2.0
WATCH_RETRY_S = 0.1

# the store, not the request, is at fault
_UNREACHED = (
    Code.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED,
    Code.CANCELLED,
    Code.RESOURCE_EXHAUSTED,
    Code.ABORTED,
    Code.UNKNOWN,
    Code.INTERNAL,
    Code.UNIMPLEMENTED,  # it is no etcd
)

_REFUSED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


def _unary(path: str, request: Any, response: Any) -> Method:
    return Method(f"/etcdserverpb.{path}", request, response, client_streaming=False, server_streaming=False)


def _bidi(path: str, request: Any, response: Any) -> Method:
    return Method(f"/etcdserverpb.{path}", request, response, client_streaming=True, server_streaming=True)


_RANGE = _unary("KV/Range", pb.RangeRequest, pb.RangeResponse)
_PUT = _unary("KV/Put", pb.PutRequest, pb.PutResponse)
_DELETE_RANGE = _unary("KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
_TXN = _unary("KV/Txn", pb.TxnRequest, pb.TxnResponse)
_COMPACT = _unary("KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
_LEASE_GRANT = _unary("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
_LEASE_REVOKE = _unary("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
_LEASE_KEEP_ALIVE = _bidi("Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
_STATUS = _unary("Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
_WATCH = _bidi("Watch/Watch", pb.WatchRequest, pb.WatchResponse)


class _HistoryLost(Exception):
    """The revision to watch from is compacted, or the store does not have what it sent before."""


class EtcdStore:
    """`endpoints`: `host:port` of the members of one cluster. `call_timeout_s` bounds every call but a watch."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        tls: Tls | None = None,
        login: EtcdLogin | None = None,
    ) -> None:
        assert endpoints, "at least one endpoint"
        options = etcd_channel_options()
        self._channels = [GrpcChannel(join_address(*parse_address(e)), options, tls) for e in endpoints]
        self._login = login
        self._names = ", ".join(endpoints)
        self._current = 0
        self._call_timeout_s = call_timeout_s
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        response = await self._call(_RANGE, pb.RangeRequest(key=key.encode()), repeatable=True)
        return _key_value(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        request = pb.RangeRequest(key=prefix.encode(), range_end=_prefix_end(prefix))
        response = await self._call(_RANGE, request, repeatable=True)
        return Listing(response.header.revision, tuple(_key_value(kv) for kv in response.kvs))

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease_id)
        return int((await self._call(_PUT, request, repeatable=False, lease_id=lease_id)).header.revision)

    async def delete(self, key: str) -> bool:
        request = pb.DeleteRangeRequest(key=key.encode())
        return bool((await self._call(_DELETE_RANGE, request, repeatable=False)).deleted)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        assert len(compares) <= MAX_TXN_OPERATIONS, "etcd's limit of comparisons in one transaction"
        assert len(operations) <= MAX_TXN_OPERATIONS, "etcd's limit of operations in one transaction"
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    result=pb.Compare.EQUAL,
                    target=pb.Compare.MOD,
                    key=compare.key.encode(),
                    mod_revision=compare.mod_revision,
                )
                for compare in compares
            ],
            success=[_operation(operation) for operation in operations],
        )
        lease_id = next((o.lease_id for o in operations if isinstance(o, Put) and o.lease_id), 0)
        response = await self._call(_TXN, request, repeatable=False, lease_id=lease_id)
        return TxnResult(response.succeeded, response.header.revision)

    async def grant(self, ttl_s: int) -> int:
        response = await self._call(_LEASE_GRANT, pb.LeaseGrantRequest(TTL=ttl_s), repeatable=True)
        return int(response.ID)

    async def keep_alive(self, lease_id: int) -> int:
        async with self._bounded():
            channel = await self._channel()
            stream = channel.stream(
                _LEASE_KEEP_ALIVE, timeout=self._call_timeout_s, metadata=await self._shown(channel)
            )
            try:
                await stream.write(pb.LeaseKeepAliveRequest(ID=lease_id))
                response = await stream.read()
            except RpcError as e:
                raise self._failure(e, channel, lease_id) from e
            finally:
                stream.cancel()
        if response is None:
            raise StoreUnavailable("etcd ended the keep-alive without an answer")
        if response.TTL <= 0:
            raise LeaseExpired(f"lease {lease_id:x}")
        return int(response.TTL)

    async def revoke(self, lease_id: int) -> None:
        try:
            await self._call(_LEASE_REVOKE, pb.LeaseRevokeRequest(ID=lease_id), repeatable=True, lease_id=lease_id)
        except LeaseExpired:
            return

    async def compact(self, revision: int) -> None:
        """For upkeep and for tests."""
        await self._call(_COMPACT, pb.CompactionRequest(revision=revision, physical=True), repeatable=False)

    async def space(self) -> Space:
        status = await self._call(_STATUS, pb.StatusRequest(), repeatable=True)
        is_full = any("NOSPACE" in error for error in status.errors)
        return Space(int(status.db_size), int(status.db_size_quota), is_full)

    async def watch(self, prefix: str, *, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        next_revision = start_revision
        last: WatchEvent | None = None  # of those handed out
        history_lost = False
        while not self._closed:
            try:
                if history_lost:
                    listing = await self.list(prefix)
                    events = tuple(WatchEvent(EventKind.PUT, kv) for kv in listing.kvs)
                    next_revision, last, history_lost = listing.revision + 1, None, False
                    yield WatchBatch(listing.revision, events, reset=True)
                async with contextlib.aclosing(self._watch_once(prefix, next_revision, last)) as batches:
                    async for batch in batches:
                        next_revision, last = batch.revision + 1, batch.events[-1]
                        yield batch
            except _HistoryLost:
                history_lost = True
            except StoreUnavailable:
                await asyncio.sleep(WATCH_RETRY_S)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _watch_once(
        self, prefix: str, start_revision: int, last: WatchEvent | None
    ) -> AsyncGenerator[WatchBatch, None]:
        """One stream, until it breaks. `last`: the event before. Raises StoreUnavailable, _HistoryLost."""
        # Asks for one revision more than is wanted. Some versions of etcd drop the deletions of the compacted revision
        # itself, and asking earlier makes that a compaction error. And `last` must come again: revisions alone do not
        # tell that the store lost some and gave their numbers to others. A member that is cut off from its quorum ends
        # a stream with `hasleader`.
        async with self._bounded():
            channel = await self._channel()
            shown = await self._shown(channel)
        stream = channel.stream(_WATCH, metadata={"hasleader": "true", **shown})
        try:
            create = pb.WatchCreateRequest(
                key=prefix.encode(), range_end=_prefix_end(prefix), start_revision=max(1, start_revision - 1)
            )
            async with self._bounded():
                await stream.write(pb.WatchRequest(create_request=create))
                response = await stream.read()
            while response is not None:
                if response.compact_revision or (response.created and response.header.revision < start_revision - 1):
                    raise _HistoryLost
                if response.canceled:
                    self._forget(shown)  # it says of a token that it knows no more what it says of a user who may not
                    raise StoreUnavailable(f"etcd cancelled the watch: {response.cancel_reason}")
                received = [_watch_event(e) for e in response.events]
                if last is not None and received:
                    if last not in received:
                        raise _HistoryLost
                    last = None
                events = tuple(event for event in received if event.kv.mod_revision >= start_revision)
                if events:
                    yield WatchBatch(events[-1].kv.mod_revision, events)
                response = await stream.read()
            raise StoreUnavailable("etcd ended the watch")
        except RpcError as e:
            raise self._failure(e, channel, 0) from e
        finally:
            stream.cancel()

    async def _call(self, method: Method, request: Message, *, repeatable: bool, lease_id: int = 0) -> Any:
        """At each endpoint at most once where `repeatable`. Raises StoreUnavailable, LeaseExpired."""
        async with self._bounded():
            for attempt in range(len(self._channels)):
                channel = await self._channel()
                try:
                    return await self._ask(channel, method, request)
                except RpcError as e:
                    failure = self._failure(e, channel, lease_id)
                    is_last = attempt == len(self._channels) - 1
                    if is_last or not repeatable or not isinstance(failure, StoreUnavailable):
                        raise failure from e
        raise AssertionError("unreachable")

    async def _ask(self, channel: GrpcChannel, method: Method, request: Message) -> Any:
        shown = await self._shown(channel)
        try:
            return await channel.call(method, request, timeout=self._call_timeout_s, metadata=shown)
        except RpcError as e:
            if not shown or not is_stale(e):
                raise
        self._forget(shown)
        return await channel.call(method, request, timeout=self._call_timeout_s, metadata=await self._shown(channel))

    async def _shown(self, channel: GrpcChannel) -> dict[str, str]:
        """Raises RpcError or StoreUnavailable."""
        if self._login is None:
            return {}
        try:
            return await self._login.metadata(channel, self._call_timeout_s)
        except RpcError as e:
            raise self._failure(e, channel, 0) from e

    def _forget(self, shown: dict[str, str]) -> None:
        if self._login is not None:
            self._login.forget(shown)

    def _bounded(self) -> _Bound:
        return _Bound(self._call_timeout_s, f"etcd at {self._names} did not answer")

    async def _channel(self) -> GrpcChannel:
        """Raises StoreUnavailable when all failed."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        channel = self._channels[self._current]
        if channel.is_ready():
            return channel
        waiting = {
            asyncio.ensure_future(channel.wait_connected()): index for index, channel in enumerate(self._channels)
        }
        try:
            pending = set(waiting)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                ready = sorted(waiting[future] for future in done if future.result())
                if ready:
                    self._current = ready[0]
                    return self._channels[self._current]
        finally:
            for future in waiting:
                future.cancel()
        raise StoreUnavailable(f"cannot connect to etcd at {self._names}")

    def _failure(self, error: RpcError, channel: GrpcChannel, lease_id: int) -> Exception:
        # an endpoint at fault is left for the next one
        if error.code is Code.NOT_FOUND and lease_id:
            return LeaseExpired(f"lease {lease_id:x}: {error.message}")
        if error.code in _UNREACHED:
            if channel is self._channels[self._current]:
                self._current = (self._current + 1) % len(self._channels)
            return StoreUnavailable(f"etcd at {self._names}: {error.message}")
        if error.code in _REFUSED or "user name is empty" in error.message:
            return StoreUnavailable(f"etcd at {self._names} refuses this service: {error.message} (--etcd-login-file)")
        return error


class _Bound:
    def __init__(self, timeout_s: float, message: str) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._message = message

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as e:
            raise StoreUnavailable(self._message) from e


def _prefix_end(prefix: str) -> bytes:
    raw = prefix.encode()
    assert raw, "a prefix is not empty"
    assert raw[-1] < 0xFF, "UTF-8 has no byte 0xff"
    return raw[:-1] + bytes([raw[-1] + 1])


def _key_value(kv: Any) -> KeyValue:
    # a key that is no text is nobody's: it is shown so that it can be named
    return KeyValue(
        kv.key.decode(errors="backslashreplace"), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease
    )


def _watch_event(event: Any) -> WatchEvent:
    return WatchEvent(EventKind.DELETE if event.type == pb.Event.DELETE else EventKind.PUT, _key_value(event.kv))


def _operation(operation: Put | Delete) -> pb.RequestOp:
    key = operation.key.encode()
    if isinstance(operation, Put):
        return pb.RequestOp(request_put=pb.PutRequest(key=key, value=operation.value, lease=operation.lease_id))
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
