"""The lines of adapters' versions, as they are changed. A change is one transaction on the name's one record, guarded
by what was read before it: every router follows by its mirror, and none ever sees a name without a version.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, KeyValue, Put, Store
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import AlreadyExists, InvalidRequest, NotFound, ServiceUnavailable
from manylora_shared.ids import is_valid_name
from manylora_shared.process.clock import WallClock
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.adapter_line import Line, LineProblem, Sticky
from manylora_shared.tenancy.trial import MAX_TRIALS, MIN_REQUESTS, STEP_LIMIT_S, STEPS, Plan

from manylora_router.links.directory import Directory
from manylora_router.links.entrance import KnownCall
from manylora_router.links.wire import adapter_line

_LOG = logging.getLogger(__name__)
_MAX_CONFLICTS = 8
_SALT_BITS = 64
MAX_TRIALS_OF_TENANT = 16  # rollouts that judge themselves, at a time


class AdapterVersions:
    def __init__(self, directory: Directory, store: Store, clock: WallClock, rng: random.Random) -> None:
        self._directory = directory
        self._store = store
        self._clock = clock
        self._rng = rng

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "RolloutAdapter": self.roll_out,
            "PromoteAdapter": self.promote,
            "RollbackAdapter": self.roll_back,
            "RetireAdapter": self.retire,
            "GetAdapterLine": self.line,
        }

    async def refuse_known(self, tenant_id: str, name: str) -> None:
        """Raises AlreadyExists, where there is a version that anybody gets."""
        stored = await self._store.get(keys.adapter(tenant_id, name))
        if stored is not None and _read(stored).line.served:
            raise AlreadyExists(f"header.name: the tenant has an adapter {name!r} already")

    async def register(self, record: AdapterRecord, call: KnownCall, *, only_new: bool) -> AdapterRecord:
        """As the first version of its name, or the next; the same bytes are the version that they are already.

        Raises AlreadyExists, InvalidRequest, or NotFound where the tenant is gone.
        """
        for _ in range(_MAX_CONFLICTS):
            tenant = await self._store.get(keys.tenant(record.tenant_id))
            if tenant is None:
                raise NotFound(f"tenant_id: tenant {record.tenant_id[:80]!r} is not known")
            stored = await self._store.get(record.key)
            if stored is None:
                changed, added = record, record
            else:
                before = _read(stored)
                if only_new and before.line.served:
                    raise AlreadyExists(f"header.name: the tenant has an adapter {record.name!r} already")
                try:
                    line, version = before.line.add(record.line.in_force, self._clock.now_unix_s())
                except LineProblem as e:
                    raise InvalidRequest.of(f"header.{e.field}", str(e)) from e
                changed = AdapterRecord.of(record.tenant_id, record.name, line)
                added = changed.at(version)
                if line == before.line:
                    return added
            await call.will(_target(record), stored.value if stored is not None else None, changed.to_json())
            result = await self._store.txn(
                [
                    Compare(record.key, stored.mod_revision if stored is not None else 0),
                    Compare(keys.tenant(record.tenant_id), tenant.mod_revision),
                ],
                [Put(record.key, changed.to_json())],
            )
            if result.succeeded:
                await self._directory.adapter_seen(record.tenant_id, record.name, result.revision)
                return added
        raise _conflict()

    async def roll_out(
        self, request: admin_pb2.RolloutAdapterRequest, call: KnownCall
    ) -> admin_pb2.RolloutAdapterResponse:
        salt = f"{self._rng.getrandbits(_SALT_BITS):016x}"
        sticky = request.sticky or Sticky.REQUEST
        plan = _plan(request.auto, trial=salt) if request.HasField("auto") else None
        if plan is not None:
            self._check_room(request, call)

        def change(line: Line, now: float) -> Line:
            return line.roll_out(request.to, request.percent, sticky, salt, now, plan)

        return admin_pb2.RolloutAdapterResponse(line=await self._change(request.tenant_id, request.name, call, change))

    def _check_room(self, request: admin_pb2.RolloutAdapterRequest, call: KnownCall) -> None:
        """Raises InvalidRequest where as many rollouts judge themselves as may."""
        tenant_id = call.principal.require_tenant(request.tenant_id)
        others = [each[:2] for each in self._directory.trials if each[:2] != (tenant_id, request.name)]
        own = [each for each in others if each[0] == tenant_id]
        for found, whose, most in ((own, "this tenant", MAX_TRIALS_OF_TENANT), (others, "all tenants", MAX_TRIALS)):
            if len(found) >= most:
                raise InvalidRequest.of("auto", f"{most} rollouts of {whose} judge themselves now, as many as may")

    async def promote(
        self, request: admin_pb2.PromoteAdapterRequest, call: KnownCall
    ) -> admin_pb2.PromoteAdapterResponse:
        def change(line: Line, now: float) -> Line:
            return line.promote(request.to, now)

        return admin_pb2.PromoteAdapterResponse(line=await self._change(request.tenant_id, request.name, call, change))

    async def roll_back(
        self, request: admin_pb2.RollbackAdapterRequest, call: KnownCall
    ) -> admin_pb2.RollbackAdapterResponse:
        return admin_pb2.RollbackAdapterResponse(
            line=await self._change(request.tenant_id, request.name, call, Line.roll_back)
        )

    async def retire(self, request: admin_pb2.RetireAdapterRequest, call: KnownCall) -> admin_pb2.RetireAdapterResponse:
        """The files stay for a while, for requests that were queued before; RouterApp collects them."""

        def change(line: Line, now: float) -> Line:
            return line.retire(request.number, now)

        return admin_pb2.RetireAdapterResponse(line=await self._change(request.tenant_id, request.name, call, change))

    async def line(self, request: admin_pb2.GetAdapterLineRequest, call: KnownCall) -> admin_pb2.GetAdapterLineResponse:
        tenant_id = call.principal.require_tenant(request.tenant_id)
        return admin_pb2.GetAdapterLineResponse(line=adapter_line(_read(await self._stored(tenant_id, request.name))))

    async def _change(
        self, tenant_id: str, name: str, call: KnownCall, change: Callable[[Line, float], Line]
    ) -> admin_pb2.AdapterLine:
        tenant_id = call.principal.require_tenant(tenant_id)
        for _ in range(_MAX_CONFLICTS):
            stored = await self._stored(tenant_id, name)
            before = _read(stored)
            try:
                line = change(before.line, self._clock.now_unix_s())
            except LineProblem as e:
                raise InvalidRequest.of(e.field, str(e)) from e
            record = AdapterRecord.of(tenant_id, name, line)
            if line == before.line:
                return adapter_line(record)
            await call.will(_target(record), stored.value, record.to_json())
            result = await self._store.txn(
                [Compare(stored.key, stored.mod_revision)], [Put(stored.key, record.to_json())]
            )
            if result.succeeded:
                event = line.events[-1]
                _LOG.info(
                    "adapter %s", event.change, extra=fields(tenant=tenant_id, adapter=name, version=event.number)
                )
                await self._directory.adapter_seen(tenant_id, name, result.revision)
                return adapter_line(record)
        raise _conflict()

    async def _stored(self, tenant_id: str, name: str) -> KeyValue:
        if not tenant_id:
            raise InvalidRequest.of("tenant_id", "is missing")
        known = is_valid_name(tenant_id) and is_valid_name(name)
        stored = await self._store.get(keys.adapter(tenant_id, name)) if known else None
        if stored is None:
            raise NotFound(f"name: adapter {name[:80]!r} is not known to this tenant")
        return stored


def _target(record: AdapterRecord) -> str:
    return f"adapter {record.tenant_id}/{record.name}"


def _plan(auto: admin_pb2.AutoRollout, *, trial: str) -> Plan:
    return Plan(tuple(auto.steps) or STEPS, auto.min_requests or MIN_REQUESTS, auto.step_limit_s or STEP_LIMIT_S, trial)


def _read(stored: KeyValue) -> AdapterRecord:
    try:
        return AdapterRecord.stored(stored)
    except ValueError as e:
        raise InvalidRequest.of("name", "its record cannot be read; remove the adapter and add it again") from e


def _conflict() -> ServiceUnavailable:
    return ServiceUnavailable("the adapter was changed by somebody else at the same time; try again", retry_after_s=0.1)
