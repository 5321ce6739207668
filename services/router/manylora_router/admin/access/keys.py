"""API keys: made, listed, rotated and revoked. Nobody gives away more than their own key may."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, KeyValue, Put, Store
from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import InvalidRequest, NotFound, Overloaded, PermissionDenied, ServiceUnavailable, Unready
from manylora_shared.ids import is_valid_name
from manylora_shared.process.clock import WallClock
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import (
    Principal,
    has_expired,
    lifetime_problems,
    new_key,
)
from manylora_shared.tenancy.roles import Scope, granted

from manylora_router.links.directory import Directory
from manylora_router.links.entrance import KnownCall
from manylora_router.links.wire import key_info

_LOG = logging.getLogger(__name__)
_MAX_CONFLICTS = 8
MAX_OWN_KEYS = 256  # of a tenant, where it makes them itself: those that have ended make room


class Keys:
    def __init__(self, directory: Directory, store: Store, clock: WallClock, rng: random.Random) -> None:
        self._directory = directory
        self._store = store
        self._clock = clock
        self._rng = rng

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "CreateKey": self.create,
            "ListKeys": self.list_all,
            "RevokeKey": self.revoke,
            "RotateKey": self.rotate,
        }

    async def create(self, request: admin_pb2.CreateKeyRequest, call: KnownCall) -> admin_pb2.CreateKeyResponse:
        made = new_key(
            self._rng.getrandbits,
            tenant_id=call.principal.require_tenant(request.tenant_id),
            scopes=request.scopes,
            role=request.role,
            name=request.name,
            now_unix_s=self._clock.now_unix_s(),
            lifetime_s=request.lifetime_s,
            networks=request.networks,
            requests_per_min=request.requests_per_min,
            tokens_per_min=request.tokens_per_min,
            concurrency=request.concurrency,
        )
        record = made.record
        _check_reach(call.principal, record)
        key = keys.api_key(record.key_id)
        for _ in range(_MAX_CONFLICTS):
            compares = [Compare(key, 0)]
            operations: list[Put | Delete] = [Put(key, record.to_json()), *self._room(call.principal)]
            if record.tenant_id:
                tenant = await self._store.get(keys.tenant(record.tenant_id))
                if tenant is None:
                    raise NotFound(f"tenant_id: tenant {record.tenant_id[:80]!r} is not known")
                compares.append(Compare(keys.tenant(record.tenant_id), tenant.mod_revision))
            await call.will(f"key {record.key_id}", None, record.to_json())
            if (await self._store.txn(compares, operations)).succeeded:
                await self._directory.key_seen(record)
                _LOG.info("key made", extra=fields(key_id=record.key_id, tenant=record.tenant_id))
                return admin_pb2.CreateKeyResponse(key=made.key, info=key_info(record))
        raise _conflict()

    def _room(self, caller: Principal) -> list[Delete]:
        """For one more of a tenant's own keys: the record that ended first goes. Raises Overloaded."""
        if caller.tenant_id is None:
            return []
        own = [record for record in self._directory.api_keys.values() if record.tenant_id == caller.tenant_id]
        if len(own) < MAX_OWN_KEYS:
            return []
        now = self._clock.now_unix_s()
        ended = [record for record in own if record.revoked_unix_s or has_expired(record, now)]
        if not ended:
            raise Overloaded(f"the tenant has {MAX_OWN_KEYS} keys in force, as many as it may make; revoke one first")
        first = min(ended, key=lambda record: (record.revoked_unix_s or record.expires_unix_s, record.key_id))
        return [Delete(first.key)]

    async def list_all(self, request: admin_pb2.ListKeysRequest, call: KnownCall) -> admin_pb2.ListKeysResponse:
        tenant_id = call.principal.require_tenant(request.tenant_id)
        found = [r for r in self._directory.api_keys.values() if tenant_id in ("", r.tenant_id)]
        found.sort(key=lambda record: (record.created_unix_s, record.key_id))
        return admin_pb2.ListKeysResponse(keys=[key_info(record) for record in found])

    async def revoke(self, request: admin_pb2.RevokeKeyRequest, call: KnownCall) -> admin_pb2.RevokeKeyResponse:
        """Revoking a key again changes nothing. A caller may revoke the key that it calls with."""
        key = keys.api_key(request.key_id)
        for _ in range(_MAX_CONFLICTS):
            stored, record = await self._stored(request.key_id, call.principal)
            if not record.revoked_unix_s:
                record = dataclasses.replace(record, revoked_unix_s=self._clock.now_unix_s())
                await call.will(f"key {record.key_id}", stored.value, record.to_json())
                result = await self._store.txn([Compare(key, stored.mod_revision)], [Put(key, record.to_json())])
                if not result.succeeded:
                    continue
                _LOG.info("key revoked", extra=fields(key_id=record.key_id, tenant=record.tenant_id))
            await self._directory.key_seen(record)
            return admin_pb2.RevokeKeyResponse(info=key_info(record))
        raise _conflict()

    async def rotate(self, request: admin_pb2.RotateKeyRequest, call: KnownCall) -> admin_pb2.RotateKeyResponse:
        """The old key's end comes no later than it was to come."""
        if violations := lifetime_problems("overlap_s", request.overlap_s):
            raise InvalidRequest.of_all(violations)
        for _ in range(_MAX_CONFLICTS):
            stored, old = await self._stored(request.key_id, call.principal)
            now = self._clock.now_unix_s()
            if old.revoked_unix_s or has_expired(old, now):
                raise Unready(f"key_id: key {old.key_id} is not in force any more; make a new one")
            made = new_key(
                self._rng.getrandbits,
                tenant_id=old.tenant_id,
                scopes=old.scopes,
                role=old.role,
                name=old.name,
                now_unix_s=now,
                lifetime_s=request.lifetime_s or max(0.0, old.expires_unix_s - old.created_unix_s),
                networks=old.networks,
                requests_per_min=old.requests_per_min,
                tokens_per_min=old.tokens_per_min,
                concurrency=old.concurrency,
            )
            ends = min(now + request.overlap_s, old.expires_unix_s or math.inf)
            replaced = dataclasses.replace(old, expires_unix_s=ends)
            new = keys.api_key(made.record.key_id)
            await call.will(f"key {old.key_id}", stored.value, replaced.to_json())
            await call.will(f"key {made.record.key_id}", None, made.record.to_json())
            result = await self._store.txn(
                [Compare(stored.key, stored.mod_revision), Compare(new, 0)],
                [
                    Put(stored.key, replaced.to_json()),
                    Put(new, made.record.to_json()),
                    *(each for each in self._room(call.principal) if each.key != stored.key),
                ],
            )
            if result.succeeded:
                await self._directory.key_seen(made.record)
                _LOG.info("key rotated", extra=fields(key_id=made.record.key_id, replaced=old.key_id))
                return admin_pb2.RotateKeyResponse(
                    key=made.key, info=key_info(made.record), replaced=key_info(replaced)
                )
        raise _conflict()

    async def _stored(self, key_id: str, caller: Principal) -> tuple[KeyValue, KeyRecord]:
        """Raises NotFound, PermissionDenied. Another tenant's key answers as one that does not exist."""
        stored = await self._store.get(keys.api_key(key_id)) if is_valid_name(key_id) else None
        record = key_record(stored) if stored is not None else None
        is_foreign = record is not None and caller.tenant_id not in (None, record.tenant_id)
        if stored is None or record is None or is_foreign:
            is_broken = stored is not None and record is None and caller.tenant_id is None
            known = "is not in force: its record cannot be read" if is_broken else "is not known"
            raise NotFound(f"key_id: key {key_id[:80]!r} {known}")
        _check_reach(caller, record)
        return stored, record


def key_record(kv: KeyValue) -> KeyRecord | None:
    try:
        return KeyRecord.stored(kv)
    except ValueError:  # logged by the mirror
        return None


def _check_reach(caller: Principal, record: KeyRecord) -> None:
    """Raises PermissionDenied where the record's key may more than the caller's may hand out."""
    if not record.tenant_id:
        if not caller.may(Scope.CLUSTER_KEYS):
            raise PermissionDenied("tenant_id: only an owner's key makes, rotates and revokes keys of no tenant")
        return
    if caller.tenant_id is not None:
        beyond = granted(record.scopes, record.role) - granted(tuple(caller.scopes), caller.role)
        if beyond:
            raise PermissionDenied(f"scopes: this key has not itself {', '.join(sorted(beyond))}")


def _conflict() -> ServiceUnavailable:
    return ServiceUnavailable("the key was changed by somebody else at the same time; try again", retry_after_s=0.1)
