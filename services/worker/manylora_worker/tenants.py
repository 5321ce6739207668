"""The tenants' policies, as far as a worker enforces them: weights of flows and bounds on KV memory.

Owns a mirror of the policies in the coordination store, and hands each change to the engine for its next token
boundary. While the store is away, what was last known stays in force. A policy that cannot be read changes nothing.
"""

from __future__ import annotations

import logging

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.session import Mirror
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import TenantId
from manylora_shared.logs import fields
from manylora_shared.policy import parse_policy

from manylora_worker.engine.tenant_shares import TenantShare
from manylora_worker.runtime import Runtime

_LOG = logging.getLogger(__name__)


class TenantWatch:
    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mirror = Mirror(
            store, keys.TENANTS, parse=lambda kv: kv.value.decode(errors="replace"), on_change=self._changed
        )

    async def start(self) -> None:
        """Returns when every policy that stands in the store is in force, through any outage."""
        self._mirror.start()
        await self._mirror.ready()

    async def close(self) -> None:
        await self._mirror.close()

    def _changed(self, tenant: str, text: str | None) -> None:
        tenant_id = TenantId(tenant)
        if text is None:
            self._runtime.set_share(tenant_id, None)
            return
        try:
            policy = parse_policy(text)
        except InvalidRequest as e:
            _LOG.error("a stored policy cannot be read", extra=fields(tenant=tenant, error=str(e)))
            return
        self._runtime.set_share(tenant_id, TenantShare.of(policy, self._runtime.model.kv_block_bytes))
