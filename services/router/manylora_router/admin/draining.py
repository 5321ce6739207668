"""Tells a service, by its id, to end in order, or a worker to drop its caches. Knows where it is from the mirrors, and
not how it does so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message
from manylora.v1 import admin_pb2, scheduler_pb2, worker_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import SchedulerMember, SchedulerRecord
from manylora_shared.errors import InvalidRequest, NotFound
from manylora_shared.ids import is_valid_name
from manylora_shared.metadata import CALLER_KEY
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY
from manylora_shared.transport.base import Method, Transport, methods_of

from manylora_router.links.directory import Directory

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_LEAVE_WORKER = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["LeavePool"]
_LEAVE_SCHEDULER = methods_of(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"])["Resign"]
_DROP_CACHES = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["DropCaches"]
_DRAIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])["Drain"]
_MAX_SHOWN = 80


class Draining:
    def __init__(
        self,
        *,
        router_id: str,
        directory: Directory,
        store: Store,
        peers: Transport,
        leave: Callable[[], None],
    ) -> None:
        """`peers`: to other services. `leave`: this router's own."""
        self._router_id = router_id
        self._directory = directory
        self._store = store
        self._peers = peers
        self._leave = leave

    async def drain(self, instance_id: str, metadata: Mapping[str, str]) -> str:
        """Returns of what kind it is. Raises NotFound, or RpcError where it does not answer."""
        directory = self._directory
        kept_out = directory.kept_out.get(instance_id)
        worker = directory.workers.get(instance_id) or (kept_out[0] if kept_out is not None else None)
        if worker is not None:
            kind = "worker"
            await self._call(self._peers, worker.address, _LEAVE_WORKER, worker_pb2.LeavePoolRequest(), {})
        elif instance_id == self._router_id:
            kind = "router"
            self._leave()
        elif (router := directory.routers.get(instance_id)) is not None:
            kind = "router"
            credentials = {key: metadata[key] for key in (AUTHORIZATION_KEY, CALLER_KEY) if key in metadata}
            request = admin_pb2.DrainRequest(id=instance_id)
            await self._call(self._peers, router.address, _DRAIN, request, credentials)
        elif (scheduler := await self._scheduler(instance_id)) is not None:
            kind = "scheduler"
            await self._call(self._peers, scheduler.address, _LEAVE_SCHEDULER, scheduler_pb2.ResignRequest(), {})
        else:
            raise NotFound(f"id: no worker, router or scheduler is called {instance_id[:_MAX_SHOWN]!r}")
        _LOG.info("a service is told to leave", extra=fields(instance=instance_id, kind=kind))
        return kind

    async def _scheduler(self, instance_id: str) -> SchedulerRecord | None:
        """That leads, or stands by. Raises StoreUnavailable."""
        leader = self._directory.leader
        if leader is not None and leader.scheduler_id == instance_id:
            return leader
        kv = await self._store.get(keys.scheduler(instance_id)) if is_valid_name(instance_id) else None
        return SchedulerMember.stored(kv) if kv is not None else None

    async def drop_caches(self, request: admin_pb2.DropWorkerCachesRequest) -> admin_pb2.DropWorkerCachesResponse:
        """Raises InvalidRequest, NotFound, or RpcError where the worker does not answer."""
        if not (request.adapters or request.prefixes):
            raise InvalidRequest.of("adapters", "neither adapters nor prefixes are to be dropped")
        worker = self._directory.workers.get(request.worker_id)
        if worker is None:
            raise NotFound(f"worker_id: no worker of the pool is called {request.worker_id[:_MAX_SHOWN]!r}")
        wanted = worker_pb2.DropCachesRequest(adapters=request.adapters, prefixes=request.prefixes)
        dropped = await self._call(self._peers, worker.address, _DROP_CACHES, wanted, {})
        told = fields(worker=request.worker_id, adapters=dropped.adapters, prefix_blocks=dropped.prefix_blocks)
        _LOG.info("a worker dropped its caches", extra=told)
        return admin_pb2.DropWorkerCachesResponse(adapters=dropped.adapters, prefix_blocks=dropped.prefix_blocks)

    async def _call(
        self, transport: Transport, address: str, method: Method, request: Message, metadata: Mapping[str, str]
    ) -> Any:
        channel = transport.connect(address)
        try:
            return await channel.call(method, request, timeout=_TIMEOUT_S, metadata=metadata)
        finally:
            await channel.close()
