"""How well flows are served, over all routers. A router asks the others in its caller's name; the status says which did
not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from manylora.v1 import admin_pb2
from manylora_shared.errors import RpcError
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.slo import Flow, FlowCounts, SloTracker
from manylora_shared.transport.base import Method, methods_of

from manylora_router.guard.permits import Guard
from manylora_router.links.directory import Directory
from manylora_router.links.other_routers import OtherRouters
from manylora_router.links.wire import circuit_status, flow_counts, slo_counts, slo_status

_METHODS = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
GET_STATUS, LIFT_QUARANTINE = _METHODS["GetStatus"], _METHODS["LiftQuarantine"]


class ServiceLevels:
    def __init__(
        self,
        *,
        directory: Directory,
        others: OtherRouters,
        slo: SloTracker,
        guard: Guard,
        num_resumed: Callable[[], int],
        caps_without_effect: Callable[[], int],
    ) -> None:
        self._router_id = others.router_id
        self._directory = directory
        self._others = others
        self._slo = slo
        self._guard = guard
        self._num_resumed = num_resumed
        self._caps_without_effect = caps_without_effect

    def local(self, tenant_id: str) -> admin_pb2.GetStatusResponse:
        """Of one tenant, or, where it is empty, of all."""
        now = asyncio.get_running_loop().time()
        counted = self._slo.counts(now, tenant_id=tenant_id)
        circuits = self._guard.circuits(now, tenant_id=tenant_id)
        return admin_pb2.GetStatusResponse(
            slo_counts=[slo_counts(flow, counts) for flow, counts in counted.items()],
            circuits=[circuit_status(state, self._router_id) for state in circuits],
            quarantined_prompts=self._guard.num_quarantined(now, tenant_id=tenant_id),
            resumed=0 if tenant_id else self._num_resumed(),
            routers=[] if tenant_id else [self._router()],
            quarantines=[
                admin_pb2.QuarantineStatus(
                    tenant_id=each, router_id=self._router_id, prompts=prompts, longest_s=longest_s
                )
                for each, (prompts, longest_s) in sorted(self._guard.quarantines(now, tenant_id=tenant_id).items())
            ],
        )

    def _router(self) -> admin_pb2.RouterStatus:
        caps = self._caps_without_effect()
        return admin_pb2.RouterStatus(router_id=self._router_id, answered=True, caps_without_effect=caps)

    async def of_cluster(self, tenant_id: str, metadata: Mapping[str, str]) -> admin_pb2.GetStatusResponse:
        """With the sums over all routers as `slos`, and the routers in them, without their addresses."""
        heard = await self._ask(GET_STATUS, admin_pb2.GetStatusRequest(local_only=True), metadata)
        parts = [self.local(tenant_id), *(answer for answer in heard.values() if answer is not None)]
        routers = {router_id: admin_pb2.RouterStatus(router_id=router_id, answered=True) for router_id in heard}
        routers = {router_id: each for router_id, each in routers.items() if heard[router_id] is not None}
        routers |= {each.router_id: each for part in parts for each in part.routers}
        return admin_pb2.GetStatusResponse(
            slos=self._sums(parts),
            circuits=[circuit for part in parts for circuit in part.circuits],
            quarantined_prompts=sum(part.quarantined_prompts for part in parts),
            resumed=sum(part.resumed for part in parts),
            quarantines=[quarantine for part in parts for quarantine in part.quarantines],
            routers=[routers[router_id] for router_id in sorted(routers)],
        )

    async def lift_quarantine(
        self, tenant_id: TenantId, metadata: Mapping[str, str], *, local_only: bool
    ) -> admin_pb2.LiftQuarantineResponse:
        """At all routers, unless `local_only`."""
        prompts = self._guard.lift_quarantine(tenant_id, asyncio.get_running_loop().time())
        heard: Mapping[str, admin_pb2.LiftQuarantineResponse | None] = {}
        if not local_only:
            request = admin_pb2.LiftQuarantineRequest(tenant_id=tenant_id, local_only=True)
            heard = await self._ask(LIFT_QUARANTINE, request, metadata)
        return admin_pb2.LiftQuarantineResponse(
            prompts=prompts + sum(answer.prompts for answer in heard.values() if answer is not None),
            missed_router_ids=[router_id for router_id, answer in heard.items() if answer is None],
        )

    async def _ask(self, method: Method, request: Message, metadata: Mapping[str, str]) -> dict[str, Any]:
        """By router id; None: no answer in time."""
        heard = await self._others.ask(method, request, metadata)
        return {router_id: None if isinstance(answer, RpcError) else answer for router_id, answer in heard.items()}

    def _sums(self, parts: Sequence[admin_pb2.GetStatusResponse]) -> list[admin_pb2.SloStatus]:
        sums: dict[Flow, FlowCounts] = {}
        for part in parts:
            for message in part.slo_counts:
                counted = flow_counts(message)
                if counted is not None:
                    flow, counts = counted
                    sums[flow] = sums.get(flow, FlowCounts()) + counts
        order = list(QosClass)
        flows = sorted(sums, key=lambda f: (f[0], order.index(f[1])))
        return [slo_status(flow, sums[flow], self._directory.slo_of(*flow)) for flow in flows]
