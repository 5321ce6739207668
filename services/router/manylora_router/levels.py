"""How well flows are served, over all routers: what each has counted is asked for when somebody wants to know.

Owns nothing: the counts and circuits are the InferenceServicer's. A router asks the others in its caller's name, so
each of them decides by the caller's own key what it may see. One that does not answer in time is missing from the sums,
and the status says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from manylora.v1 import admin_pb2
from manylora_shared.errors import RpcError
from manylora_shared.identity import AUTHORIZATION_KEY
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.logs import fields
from manylora_shared.slo import Flow, FlowCounts, SloTracker, quantile_ms
from manylora_shared.transport.base import Transport, methods_of

from manylora_router.directory import Directory
from manylora_router.guard import Guard
from manylora_router.job import QOS

_LOG = logging.getLogger(__name__)

GET_STATUS = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])["GetStatus"]
_TIMEOUT_S = 1.0
_CLASSES = {number: qos_class for qos_class, number in QOS.items()}


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
        """What this router has counted itself; of one tenant, or, where it is empty, of all."""
        now = asyncio.get_running_loop().time()
        states = self._guard.circuits(now, tenant_id=tenant_id)
        return admin_pb2.GetStatusResponse(
            slo_counts=[_message(flow, counts) for flow, counts in self._slo.counts(now, tenant_id=tenant_id).items()],
            circuits=[
                admin_pb2.CircuitStatus(
                    tenant_id=state.scope[0],
                    whole_tenant=len(state.scope) == 1,
                    adapter_version=(state.scope[1] or "") if len(state.scope) == 2 else "",
                    router_id=self._router_id,
                    half_open=state.is_half_open,
                    retry_after_s=state.retry_after_s,
                    openings=state.openings,
                )
                for state in states
            ],
            quarantined_prompts=self._guard.num_quarantined(now, tenant_id=tenant_id),
        )

    async def of_cluster(
        self, tenant_id: str, metadata: Mapping[str, str]
    ) -> tuple[admin_pb2.GetStatusResponse, list[str]]:
        """The same with the sums over all routers as `slos`, and the ids of the routers that they hold.

        Args:
            tenant_id: as for `local`.
            metadata: the caller's: its key is shown to the other routers.
        """
        others = {
            router_id: record.address
            for router_id, record in sorted(self._directory.routers.items())
            if router_id != self._router_id
        }
        credentials = {AUTHORIZATION_KEY: metadata.get(AUTHORIZATION_KEY, "")}
        answers = await asyncio.gather(*(self._ask(address, credentials) for address in others.values()))
        heard = dict(zip(others, answers, strict=True))
        parts = [self.local(tenant_id), *(answer for answer in answers if answer is not None)]
        whole = admin_pb2.GetStatusResponse(
            slos=self._sums(parts),
            circuits=[circuit for part in parts for circuit in part.circuits],
            quarantined_prompts=sum(part.quarantined_prompts for part in parts),
        )
        return whole, [self._router_id, *(router_id for router_id, answer in heard.items() if answer is not None)]

    async def _ask(self, address: str, credentials: Mapping[str, str]) -> admin_pb2.GetStatusResponse | None:
        channel = self._transport.connect(address)
        try:
            request = admin_pb2.GetStatusRequest(local_only=True)
            answer: admin_pb2.GetStatusResponse = await channel.call(
                GET_STATUS, request, timeout=_TIMEOUT_S, metadata=credentials
            )
            return answer
        except RpcError as e:
            _LOG.warning("a router gave no counts", extra=fields(address=address, error=str(e)))
            return None
        finally:
            await channel.close()

    def _sums(self, parts: Sequence[admin_pb2.GetStatusResponse]) -> list[admin_pb2.SloStatus]:
        """Sorted by tenant and class."""
        sums: dict[Flow, FlowCounts] = {}
        for part in parts:
            for message in part.slo_counts:
                if message.qos_class in _CLASSES:
                    flow = TenantId(message.tenant_id), _CLASSES[message.qos_class]
                    sums[flow] = sums.get(flow, FlowCounts()) + _counts(message)
        order = list(QosClass)
        return [self._status(flow, sums[flow]) for flow in sorted(sums, key=lambda f: (f[0], order.index(f[1])))]

    def _status(self, flow: Flow, counts: FlowCounts) -> admin_pb2.SloStatus:
        slo = self._directory.slo_of(*flow)
        target = slo.availability if slo is not None else None
        return admin_pb2.SloStatus(
            tenant_id=flow[0],
            qos_class=QOS[flow[1]],
            requests=counts.num_counted,
            failed=counts.bad,
            availability=counts.availability,
            availability_target=target,
            error_budget=counts.error_budget(target) if target is not None else None,
            measured=counts.num_measured,
            ttft_p50_ms=quantile_ms(counts.ttft, 0.5),
            ttft_p95_ms=quantile_ms(counts.ttft, 0.95),
            ttft_p99_ms=quantile_ms(counts.ttft, 0.99),
            ttft_p95_target_ms=slo.ttft_p95_ms if slo is not None else None,
            ttft_met=counts.is_ttft_met,
            tpot_p50_ms=quantile_ms(counts.tpot, 0.5),
            tpot_p95_ms=quantile_ms(counts.tpot, 0.95),
        )


def _message(flow: Flow, counts: FlowCounts) -> admin_pb2.SloCounts:
    return admin_pb2.SloCounts(
        tenant_id=flow[0],
        qos_class=QOS[flow[1]],
        good=counts.good,
        bad=counts.bad,
        in_time=counts.in_time,
        late=counts.late,
        ttft=counts.ttft,
        tpot=counts.tpot,
    )


def _counts(message: admin_pb2.SloCounts) -> FlowCounts:
    return FlowCounts(message.good, message.bad, message.in_time, message.late, dict(message.ttft), dict(message.tpot))
