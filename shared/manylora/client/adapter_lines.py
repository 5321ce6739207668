"""Versions of adapters, as a part of Client.adapters."""

from __future__ import annotations

from manylora_shared.transport.base import methods_of

from manylora.client.caller import DEFAULT_TIMEOUT_S, Caller
from manylora.client.cluster import AdapterLine, AutoRollout
from manylora.client.messages import line_from
from manylora.v1 import admin_pb2

_ADMIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])


class AdapterLines:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def rollout(
        self,
        tenant_id: str,
        name: str,
        *,
        to: int,
        percent: int = 0,
        sticky: str = "",
        auto: AutoRollout | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AdapterLine:
        """
        Args:
            sticky: request, conversation or user; empty: request.
            auto: the share then grows by itself, to a promotion or a rollback, and percent is not read.
        """
        request = admin_pb2.RolloutAdapterRequest(tenant_id=tenant_id, name=name, to=to, percent=percent, sticky=sticky)
        if auto is not None:
            plan = admin_pb2.AutoRollout(
                steps=auto.steps, min_requests=auto.min_requests, step_limit_s=auto.step_limit_s
            )
            request.auto.CopyFrom(plan)
        return line_from((await self._caller.call(_ADMIN["RolloutAdapter"], request, timeout_s=timeout_s)).line)

    async def promote(
        self, tenant_id: str, name: str, *, to: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AdapterLine:
        """to: 0 is the rollout's version, or else the newest."""
        request = admin_pb2.PromoteAdapterRequest(tenant_id=tenant_id, name=name, to=to)
        return line_from(
            (await self._caller.call(_ADMIN["PromoteAdapter"], request, timeout_s=timeout_s, repeatable=False)).line
        )

    async def rollback(self, tenant_id: str, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> AdapterLine:
        """Not repeated by itself: a second one would go a version further back."""
        request = admin_pb2.RollbackAdapterRequest(tenant_id=tenant_id, name=name)
        return line_from(
            (await self._caller.call(_ADMIN["RollbackAdapter"], request, timeout_s=timeout_s, repeatable=False)).line
        )

    async def retire(
        self, tenant_id: str, name: str, number: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AdapterLine:
        request = admin_pb2.RetireAdapterRequest(tenant_id=tenant_id, name=name, number=number)
        return line_from(
            (await self._caller.call(_ADMIN["RetireAdapter"], request, timeout_s=timeout_s, repeatable=False)).line
        )

    async def history(self, tenant_id: str, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> AdapterLine:
        request = admin_pb2.GetAdapterLineRequest(tenant_id=tenant_id, name=name)
        return line_from((await self._caller.call(_ADMIN["GetAdapterLine"], request, timeout_s=timeout_s)).line)
