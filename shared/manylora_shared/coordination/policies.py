"""Tenants' policies as they are stored. One that cannot be read, or is another tenant's, changes nothing: neither where
it takes a policy's place, nor where a service starts and finds it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue, Listing, Store
from manylora_shared.coordination.session import Mirror
from manylora_shared.errors import InvalidRequest
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy, parse_policy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPolicy:
    document: bytes
    in_force: bytes  # the last document that could be read; where there is none, whoever uses it finds out
    version: int
    mod_revision: int
    problem: str = ""  # why `document` is not in force, as far as it was looked at; for people

    @property
    def policy_yaml(self) -> str:
        """For people."""
        return self.document.decode(errors="replace")


class PolicyMirror(Mirror[StoredPolicy]):
    """By tenant. Reads a document when it takes another's place, so that the other can stay in force; of those that
    stood there before, the ones that are not what AdminService applied last."""

    def __init__(self, store: Store, on_change: Callable[[str, StoredPolicy | None], None]) -> None:
        super().__init__(store, keys.TENANTS, parse=self._stored, on_change=on_change)
        self._applied: dict[str, bytes] = {}  # where something else is stored, at the first listing

    async def _listed(self) -> Listing:
        listing = await super()._listed()
        stored = {kv.key.removeprefix(keys.TENANTS): kv.value for kv in listing.kvs}
        applied = await self._store.list(keys.APPLIED)
        for kv in applied.kvs:
            tenant_id = kv.key.removeprefix(keys.APPLIED)
            if stored.get(tenant_id, kv.value) != kv.value:
                self._applied[tenant_id] = kv.value
        return listing

    def _stored(self, kv: KeyValue) -> StoredPolicy:
        tenant_id = kv.key.removeprefix(keys.TENANTS)
        before = self.values.get(tenant_id)
        # a store that was restored may have another document under the same revision
        if before is not None and (before.mod_revision, before.document) == (kv.mod_revision, kv.value):
            return before
        last = before.in_force if before is not None else self._applied.pop(tenant_id, None)
        if last is None and not self._ready.is_set():  # of very many, and all but these few are as they were applied
            return StoredPolicy(kv.value, kv.value, kv.version, kv.mod_revision)
        _, problem = _read(tenant_id, kv.value)
        if not problem:
            return StoredPolicy(kv.value, kv.value, kv.version, kv.mod_revision)
        told = "the one before it is in force" if last is not None else "requests are refused"
        problem = f"{problem}; {told} until a policy is applied"
        return StoredPolicy(kv.value, last if last is not None else kv.value, kv.version, kv.mod_revision, problem)


def stored_policy(tenant_id: str, document: bytes) -> TenantPolicy | None:
    # None: it was written past AdminService, or by a version that knows more.
    policy, _ = _read(tenant_id, document)
    return policy


def _read(tenant_id: str, document: bytes) -> tuple[TenantPolicy | None, str]:
    """The policy, or what is wrong with it."""
    try:
        policy = parse_policy(document.decode())
        if policy.tenant_id == tenant_id:
            return policy, ""
        error = f"it is the policy of {policy.tenant_id}"
    except UnicodeDecodeError as e:
        error = f"it is no text: {e}"
    except InvalidRequest as e:
        error = e.message
    _LOG.error("a stored policy cannot be read", extra=fields(tenant=tenant_id, error=error))
    return None, error
