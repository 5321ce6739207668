"""What AdminService tells of the cluster: to an operator all of it, to a tenant its own part. The status says which
parts did not answer. Who asks in the same moment shares the work and the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from manylora.v1 import admin_pb2, common_pb2, scheduler_pb2, status_pb2
from manylora_shared.errors import RpcError
from manylora_shared.ids import TenantId
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Transport

from manylora_router.admin.service_levels import ServiceLevels
from manylora_router.links.directory import Directory, Model
from manylora_router.links.moments import Moments
from manylora_router.links.scheduler_client import GET_STATUS
from manylora_router.links.wire import rollout_status

_LOG = logging.getLogger(__name__)
_STATUS_TIMEOUT_S = 2.0


class ClusterStatus:
    def __init__(self, *, directory: Directory, transport: Transport, levels: ServiceLevels) -> None:
        self._directory = directory
        self._transport = transport
        self._levels = levels
        self.moments = Moments()

    def close(self) -> None:
        self.moments.close()

    async def told(
        self, tenant_id: str, metadata: Mapping[str, str], *, local_only: bool
    ) -> admin_pb2.GetStatusResponse:
        """Args:
        tenant_id: to whom; empty: to an operator.
        metadata: the caller's: its key is shown to the other routers.
        local_only: what this router has counted itself."""

        async def local() -> admin_pb2.GetStatusResponse:
            return self._levels.local(tenant_id)

        if local_only:
            return await self.moments.once(("local", tenant_id), local)
        return await self.moments.once(("cluster", tenant_id), lambda: self._of_cluster(tenant_id, metadata))

    async def _of_cluster(self, tenant_id: str, metadata: Mapping[str, str]) -> admin_pb2.GetStatusResponse:
        answer, levels = await asyncio.gather(
            self.moments.once(("scheduler",), self._scheduler_status), self._levels.of_cluster(tenant_id, metadata)
        )
        if tenant_id:
            return self._of_tenant(tenant_id, answer, levels)
        return self._of_all(answer, levels)

    def _of_all(
        self,
        answer: scheduler_pb2.GetSchedulerStatusResponse,
        levels: admin_pb2.GetStatusResponse,
    ) -> admin_pb2.GetStatusResponse:
        directory = self._directory
        reported = {status.worker_id: status for status in answer.workers}
        workers: list[admin_pb2.WorkerStatus] = []
        for worker_id, record in sorted(directory.workers.items()):
            status = admin_pb2.WorkerStatus(sequence_slots=record.sequence_slots)
            if worker_id in reported:
                status.CopyFrom(reported[worker_id])
            status.worker_id, status.address, status.device = worker_id, record.address, record.device
            status.device_adapter_bytes, status.pool = record.device_adapter_bytes, record.pool
            if status.dedicated_tenant:
                status.dedicated_adapter = self._name_of(status.dedicated_tenant, status.dedicated_version)
            workers.append(status)
        for worker_id, (record, reason) in sorted(directory.kept_out.items()):
            workers.append(
                admin_pb2.WorkerStatus(
                    worker_id=worker_id,
                    address=record.address,
                    device=record.device,
                    kept_out=reason,
                    pool=record.pool,
                )
            )
        model = directory.model
        for advice in answer.scheduler.merge_advice:
            advice.adapter = self._name_of(advice.tenant_id, advice.adapter_version)
        self._name_pools(answer.scheduler.pools)
        return admin_pb2.GetStatusResponse(
            base_model=model.name if model is not None else "",
            sampling_defaults=_sampling_of(model),
            scheduler=answer.scheduler,
            workers=workers,
            routers=self._routers({each.router_id: each for each in levels.routers}),
            tenants=len(directory.tenants),
            adapters=len(directory.adapters),
            slos=levels.slos,
            circuits=levels.circuits,
            resumed=levels.resumed,
            quarantined_prompts=levels.quarantined_prompts,
            quarantines=levels.quarantines,
            rollouts=self._rollouts(""),
        )

    def _routers(self, heard: Mapping[str, admin_pb2.RouterStatus]) -> list[admin_pb2.RouterStatus]:
        found = []
        for router_id, record in sorted(self._directory.routers.items()):
            status = admin_pb2.RouterStatus(router_id=router_id)
            status.CopyFrom(heard.get(router_id, status))
            status.address = record.address
            found.append(status)
        return found

    def _name_of(self, tenant_id: str, digest: str) -> str:
        """Of several with the same content, one that the policy dedicates, then one that has it in force; or empty."""
        policy = self._directory.policy_of(TenantId(tenant_id))
        dedicated = policy.dedicated if policy is not None else {}
        having = [
            (record.name in dedicated, record.line.in_force.uid == digest, record.name)
            for record in self._directory.adapters_of(tenant_id)
            if any(each.uid == digest for each in record.line.served)
        ]
        return max(having, key=lambda each: each[:2])[2] if having else ""

    def _name_pools(self, pools: Iterable[admin_pb2.PoolStatus]) -> None:
        for pool in pools:
            model = self._directory.models.get(pool.pool)
            pool.base_model = model.name if model is not None else ""

    def _rollouts(self, tenant_id: str) -> list[admin_pb2.RolloutStatus]:
        """Empty: of all tenants."""
        found = [each for _, each in sorted(self._directory.rollouts.items()) if tenant_id in ("", each.tenant_id)]
        return [rollout_status(each) for each in found]

    def _of_tenant(
        self,
        tenant_id: str,
        answer: scheduler_pb2.GetSchedulerStatusResponse,
        levels: admin_pb2.GetStatusResponse,
    ) -> admin_pb2.GetStatusResponse:
        """The model, the tenant's own flows and counts. Nothing of other tenants or of machines."""
        for circuit in levels.circuits:
            circuit.router_id = ""
        for quarantine in levels.quarantines:
            quarantine.router_id = ""
        pools = self._directory.pools_of(TenantId(tenant_id))
        model = self._directory.models.get(pools[0])
        told = [pool for pool in answer.scheduler.pools if pool.pool in pools]
        self._name_pools(told)
        return admin_pb2.GetStatusResponse(
            base_model=model.name if model is not None else "",
            sampling_defaults=_sampling_of(model),
            scheduler=admin_pb2.SchedulerStatus(
                reachable=answer.scheduler.reachable,
                flows=[_without_debt(flow) for flow in answer.scheduler.flows if flow.tenant_id == tenant_id],
                quotas=[quota for quota in answer.scheduler.quotas if quota.tenant_id == tenant_id],
                overload=_overload_of(answer.scheduler.overload, tenant_id),
                pools=[_pool_of(pool, tenant_id) for pool in told],
                kv=[kv for kv in answer.scheduler.kv if kv.tenant_id == tenant_id],
                adapters=[_without_machines(a) for a in answer.scheduler.adapters if a.tenant_id == tenant_id],
            ),
            tenants=1 if tenant_id in self._directory.tenants else 0,
            adapters=len(self._directory.adapters_of(tenant_id)),
            slos=[slo for slo in levels.slos if slo.tenant_id == tenant_id],
            circuits=[circuit for circuit in levels.circuits if circuit.tenant_id == tenant_id],
            quarantined_prompts=levels.quarantined_prompts,
            quarantines=[each for each in levels.quarantines if each.tenant_id == tenant_id],
            rollouts=self._rollouts(tenant_id),
        )

    async def _scheduler_status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
        """`reachable` is false where no leader answers."""
        address = self._directory.leader_address()
        if address is None:
            return scheduler_pb2.GetSchedulerStatusResponse()
        channel = self._transport.connect(address)
        try:
            answer: scheduler_pb2.GetSchedulerStatusResponse = await channel.call(
                GET_STATUS, scheduler_pb2.GetSchedulerStatusRequest(), timeout=_STATUS_TIMEOUT_S
            )
        except RpcError as e:
            _LOG.warning("the scheduler gave no status", extra=fields(address=address, error=str(e)))
            answer = scheduler_pb2.GetSchedulerStatusResponse()
            answer.scheduler.address = address
            return answer
        finally:
            await channel.close()
        answer.scheduler.reachable = True
        answer.scheduler.address = address
        return answer


def _sampling_of(model: Model | None) -> common_pb2.SamplingParams | None:
    return common_pb2.SamplingParams(**model.sampling_defaults) if model is not None else None


def _overload_of(overload: admin_pb2.OverloadStatus, tenant_id: str) -> admin_pb2.OverloadStatus:
    tenants = [each for each in overload.tenants if each.tenant_id == tenant_id]
    return admin_pb2.OverloadStatus(level=overload.level, rung=overload.rung, tenants=tenants)


def _pool_of(pool: admin_pb2.PoolStatus, tenant_id: str) -> admin_pb2.PoolStatus:
    overload = _overload_of(pool.overload, tenant_id)
    return admin_pb2.PoolStatus(pool=pool.pool, base_model=pool.base_model, overload=overload)


def _without_debt(flow: admin_pb2.FlowStatus) -> admin_pb2.FlowStatus:
    # it tells how far the others have come
    told = admin_pb2.FlowStatus()
    told.CopyFrom(flow)
    told.debt_cost = 0
    return told


def _without_machines(adapters: status_pb2.TenantAdapters) -> status_pb2.TenantAdapters:
    # neither how many workers there are, nor that others were in its adapters' way
    told = status_pb2.TenantAdapters()
    told.CopyFrom(adapters)
    told.displaced = 0
    for pin in told.pins:
        pin.on_device, pin.workers = int(pin.on_device == pin.workers), 1
    return told
