"""How well flows are served, over all routers. A router asks the others in its caller's name; the status says which did
not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from manylora.v1 import admin_pb2
from manylora_shared.errors import RpcError
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY
from manylora_shared.tenancy.slo import Flow, FlowCounts, SloTracker
from manylora_shared.transport.base import Method, Transport, methods_of

from manylora_router.guard.permits import Guard
from manylora_router.links.directory import Directory
from manylora_router.links.wire import circuit_status, flow_counts, slo_counts, slo_status

_LOG = logging.getLogger(__name__)

_METHODS = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
GET_STATUS, LIFT_QUARANTINE = _METHODS["GetStatus"], _METHODS["LiftQuarantine"]
_TIMEOUT_S = 1.0


class ServiceLevels:
    def __init__(
        self, *, router_id: str, directory: Directory, transport: Transport, slo: SloTracker, guard: Guard
    ) -> None:
        self._router_id = router_id
        self._directory = directory
        self._transport = transport
        self._slo = slo
        self._guard = guard

    def local(self, tenant_id: str) -> admin_pb2.GetStatusResponse:
        """Of one tenant, or, where it is empty, of all."""
        now = asyncio.get_running_loop().time()
        counted = self._slo.counts(now, tenant_id=tenant_id)
        circuits = self._guard.circuits(now, tenant_id=tenant_id)
        return admin_pb2.GetStatusResponse(
            slo_counts=[slo_counts(flow, counts) for flow, counts in counted.items()],
            circuits=[circuit_status(state, self._router_id) for state in circuits],
            quarantined_prompts=self._guard.num_quarantined(now, tenant_id=tenant_id),
            quarantines=[
                admin_pb2.QuarantineStatus(
                    tenant_id=each, router_id=self._router_id, prompts=prompts, longest_s=longest_s
                )
                for each, (prompts, longest_s) in sorted(self._guard.quarantines(now, tenant_id=tenant_id).items())
            ],
        )

    async def of_cluster(
        self, tenant_id: str, metadata: Mapping[str, str]
    ) -> tuple[admin_pb2.GetStatusResponse, list[str]]:
        """With the sums over all routers as `slos`, and the ids of the routers in them."""
        heard = await self._ask_others(GET_STATUS, admin_pb2.GetStatusRequest(local_only=True), metadata)
        parts = [self.local(tenant_id), *(answer for answer in heard.values() if answer is not None)]
        whole = admin_pb2.GetStatusResponse(
            slos=self._sums(parts),
            circuits=[circuit for part in parts for circuit in part.circuits],
            quarantined_prompts=sum(part.quarantined_prompts for part in parts),
            quarantines=[quarantine for part in parts for quarantine in part.quarantines],
        )
        return whole, [self._router_id, *(router_id for router_id, answer in heard.items() if answer is not None)]

    async def lift_quarantine(
        self, tenant_id: TenantId, metadata: Mapping[str, str], *, local_only: bool
    ) -> admin_pb2.LiftQuarantineResponse:
        """At all routers, unless `local_only`."""
        prompts = self._guard.lift_quarantine(tenant_id, asyncio.get_running_loop().time())
        heard: Mapping[str, admin_pb2.LiftQuarantineResponse | None] = {}
        if not local_only:
            request = admin_pb2.LiftQuarantineRequest(tenant_id=tenant_id, local_only=True)
            heard = await self._ask_others(LIFT_QUARANTINE, request, metadata)
        return admin_pb2.LiftQuarantineResponse(
            prompts=prompts + sum(answer.prompts for answer in heard.values() if answer is not None),
            missed_router_ids=[router_id for router_id, answer in heard.items() if answer is None],
        )

    async def _ask_others(self, method: Method, request: Message, metadata: Mapping[str, str]) -> dict[str, Any]:
        """By router id; None: no answer in time."""
        others = {
            router_id: record.address
            for router_id, record in sorted(self._directory.routers.items())
            if router_id != self._router_id
        }
        credentials = {AUTHORIZATION_KEY: metadata.get(AUTHORIZATION_KEY, "")}
        asked = (self._ask(address, method, request, credentials) for address in others.values())
        return dict(zip(others, await asyncio.gather(*asked), strict=True))

    async def _ask(self, address: str, method: Method, request: Message, credentials: Mapping[str, str]) -> Any:
        channel = self._transport.connect(address)
        try:
            return await channel.call(method, request, timeout=_TIMEOUT_S, metadata=credentials)
        except RpcError as e:
            more = fields(address=address, method=method.path, error=str(e))
            _LOG.warning("a router did not answer another", extra=more)
            return None
        finally:
            await channel.close()

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
