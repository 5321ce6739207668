"""Tenants' policies as they are stored. One that cannot be read, or is another tenant's, changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue, Store
from manylora_shared.coordination.session import Mirror
from manylora_shared.errors import InvalidRequest
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy, parse_policy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPolicy:
    document: bytes
    in_force: bytes  # the last document that could be read; a first one is read by whoever uses it
    version: int
    mod_revision: int

    @property
    def policy_yaml(self) -> str:
        """For people."""
        return self.document.decode(errors="replace")


class PolicyMirror(Mirror[StoredPolicy]):
    """By tenant. Reads a document when it takes another's place, so that the other can stay in force."""

    def __init__(self, store: Store, on_change: Callable[[str, StoredPolicy | None], None]) -> None:
        super().__init__(store, keys.TENANTS, parse=self._stored, on_change=on_change)

    def _stored(self, kv: KeyValue) -> StoredPolicy:
        tenant_id = kv.key.removeprefix(keys.TENANTS)
        before = self.values.get(tenant_id)
        in_force = kv.value
        if before is not None:
            if before.mod_revision == kv.mod_revision:
                return before
            if stored_policy(tenant_id, kv.value) is None:
                in_force = before.in_force
        return StoredPolicy(kv.value, in_force, kv.version, kv.mod_revision)


def stored_policy(tenant_id: str, document: bytes) -> TenantPolicy | None:
    # None: it was written past AdminService, or by a version that knows more.
    try:
        policy = parse_policy(document.decode())
        if policy.tenant_id == tenant_id:
            return policy
        error = f"it is the policy of {policy.tenant_id}"
    except UnicodeDecodeError as e:
        error = f"it is no text: {e}"
    except InvalidRequest as e:
        error = e.message
    _LOG.error("a stored policy cannot be read", extra=fields(tenant=tenant_id, error=error))
    return None
