"""A version of an adapter from its files to its verdict: the stages in order, and the report that is kept with it.

Owns nothing between calls: reports and samples stand in the adapter store, under their tenant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Sequence

from manylora.v1 import admin_pb2, worker_pb2
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import DataLost, InvalidRequest, NotFound, Unready
from manylora_shared.ids import AdapterDigest, AdapterName, TenantId, is_digest
from manylora_shared.process.clock import WallClock
from manylora_shared.stores.documents import REPORTS, SAMPLES, Documents, path_of
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.adapter_gate import Against, GateRule, Verdict
from manylora_shared.tenancy.adapter_line import AdapterVersion
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_router.admin.adapters import AdapterIntake, AdapterRefused, Taken, UploadPart
from manylora_router.admin.asking import Subject
from manylora_router.admin.quality_gate import QualityGate
from manylora_router.guard.admission import alone
from manylora_router.links.directory import Directory
from manylora_router.links.loop_turns import PoolTurns
from manylora_router.quality.report import Report, digest_of
from manylora_router.quality.samples import Sample, parsing

_LOG = logging.getLogger(__name__)
GIVEN_SAMPLES = "(given)"


class AdapterValidation:
    def __init__(
        self, intake: AdapterIntake, gate: QualityGate, documents: Documents, directory: Directory, clock: WallClock
    ) -> None:
        self._intake = intake
        self._gate = gate
        self._documents = documents
        self._directory = directory
        self._clock = clock
        self._parsing = PoolTurns(1)  # of samples

    async def take_in(
        self,
        header: admin_pb2.AddAdapterHeader,
        requests: AsyncIterator[UploadPart],
        policy: TenantPolicy,
        *,
        is_operator: bool,
    ) -> tuple[AdapterRecord, Report]:
        """The version as it is to be registered, maybe as one that is not served, with its report in the store.

        Raises as AdapterIntake.take_in, and Unready where the policy's samples are not there or cannot be used.
        """
        rule = policy.adapter_gate
        samples = await self._samples_of(header.tenant_id, rule) if rule is not None else []
        taken = await self._intake.take_in(header, requests, is_operator=is_operator)
        if any(each.uid == taken.record.uid for each in self._served(header)):
            return taken.record, self._report(taken)  # the version that it is already
        report = self._report(taken)
        if rule is not None:
            report = await self._judged(taken, policy, self._before(header), rule, samples)
        data = report.to_json()
        await self._documents.put(path_of(header.tenant_id, REPORTS, digest_of(data)), data)
        state = "" if report.verdict is Verdict.PASSED else report.verdict.value
        if state:
            more = fields(tenant=header.tenant_id, adapter=header.name, digest=taken.record.uid)
            _LOG.warning("an adapter's version is not served: the gate's verdict is %s", state, extra=more)
        return dataclasses.replace(taken.record, state=state, report=digest_of(data)), report

    async def check(
        self,
        header: admin_pb2.AddAdapterHeader,
        requests: AsyncIterator[UploadPart],
        policy: TenantPolicy,
        *,
        is_operator: bool,
    ) -> Report:
        """Registers nothing. What is wrong with the adapter stands in the report. Raises as AdapterIntake.take_in."""
        try:
            taken = await self._intake.take_in(header, requests, is_operator=is_operator, takes_samples=True)
        except InvalidRequest as e:
            stage = e.stage if isinstance(e, AdapterRefused) else "format"
            told = [f"{v.field}: {v.description}" for v in e.violations] or [e.message]
            return self._begun(header, "").failed(stage, *told).violated(e.violations)
        rule = policy.adapter_gate
        if taken.samples:
            rule = dataclasses.replace(rule or GateRule(GIVEN_SAMPLES), samples=GIVEN_SAMPLES)
            rule = dataclasses.replace(rule, judge=header.judge or rule.judge)
            samples = await self.parsed(header.tenant_id, taken.samples)
        elif header.judge:
            raise InvalidRequest.of("header.judge", "goes with samples of the check's own")
        else:
            samples = await self._samples_of(header.tenant_id, rule) if rule is not None else []
        return await self._judged(taken, policy, self._before(header), rule, samples)

    async def report(self, tenant_id: str, version: AdapterVersion) -> bytes:
        """Raises NotFound."""
        if not is_digest(version.report):
            raise NotFound(f"number: version {version.number} has no report")
        data = await self._documents.get(path_of(tenant_id, REPORTS, version.report))
        if digest_of(data) != version.report:
            raise DataLost(f"the report of version {version.number} is not what was kept: its digest is another")
        return data

    async def parsed(self, tenant_id: str, samples: bytes) -> list[Sample]:
        """Raises InvalidRequest with the lines at fault."""
        async with self._parsing.hold((tenant_id, None), 1, 1):
            steps = parsing(samples)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    found: list[Sample] = end.value
                    return found
                await asyncio.sleep(0)  # others have the event loop

    async def _samples_of(self, tenant_id: str, rule: GateRule) -> list[Sample]:
        try:
            return await self.parsed(tenant_id, await self._documents.get(path_of(tenant_id, SAMPLES, rule.samples)))
        except NotFound:
            raise Unready(f"adapters.gate.samples: the tenant has no samples {rule.samples!r}") from None
        except InvalidRequest as e:
            raise Unready(f"adapters.gate.samples: {rule.samples}: {e.message}") from e

    def _served(self, header: admin_pb2.AddAdapterHeader) -> Sequence[AdapterVersion]:
        line = self._directory.line_of(TenantId(header.tenant_id), AdapterName(header.name))
        return line.served if line is not None else ()

    def _before(self, header: admin_pb2.AddAdapterHeader) -> AdapterVersion | None:
        line = self._directory.line_of(TenantId(header.tenant_id), AdapterName(header.name))
        return line.in_force if line is not None and line.in_force.is_served else None

    async def _judged(
        self,
        taken: Taken,
        policy: TenantPolicy,
        before: AdapterVersion | None,
        rule: GateRule | None,
        samples: Sequence[Sample],
    ) -> Report:
        record, report = taken.record, self._report(taken)
        model = self._directory.models.get(record.pool)
        assert model is not None, "a worker has validated it"
        digest = AdapterDigest(record.uid)
        candidate = alone(AdapterName(record.name or "candidate"), policy.copy_of(digest), record.pool)
        own = Subject(Against.CANDIDATE, candidate=candidate)
        line = [Subject(Against.BEFORE, f"{record.name}@{before.number}")] if before is not None else []
        if rule is not None:
            try:
                report = await self._gate.judge(report, [own, *line, Subject(Against.BASE)], rule, samples, record.pool)
            except InvalidRequest as e:  # samples that lack what their judge needs
                report = report.left_open("quality", e.message)
        if report.verdict is Verdict.PASSED:
            sizes: dict[str, int] = {Against.CANDIDATE: record.size_bytes}
            if before is not None:
                sizes[Against.BEFORE] = before.size_bytes
            report = await self._gate.measure(report, [own, *line], sizes, model.limits, record.pool)
        return report

    def _begun(self, header: admin_pb2.AddAdapterHeader | AdapterRecord, digest: str) -> Report:
        return Report(header.tenant_id, header.name, digest, self._clock.now_unix_s())

    def _report(self, taken: Taken) -> Report:
        """Of what the worker has found."""
        record, coverage = taken.record, taken.coverage
        model = self._directory.models.get(record.pool)
        report = self._begun(record, record.uid).passed("format")
        if model is not None:
            ranks = [worker.max_lora_rank for worker in self._directory.workers_of(record.pool)]
            base = {
                "name": model.name,
                "digest": model.digest,
                "pool": record.pool,
                "vocab_size": model.limits.vocab_size,
                "max_context_tokens": model.limits.max_context_tokens,
                "max_lora_rank": min(ranks, default=0),
            }
            report = report.with_part("base", base)
        adapter = {
            "rank": record.max_lora_rank,
            "size_bytes": record.size_bytes,
            "target_modules": list(record.target_modules),
        }
        if record.rope:
            adapter |= {"rope": json.loads(record.rope), "max_context_tokens": record.max_context_tokens}
        report = report.passed("compatibility").with_part("adapter", adapter)
        report = report.passed("coverage", _covered(coverage)).passed("trial")
        report = report.with_part("modules", [{"path": m.path, "rank": m.rank} for m in coverage.modules])
        tensors = {
            "layers": coverage.layers,
            "tensors": coverage.tensors,
            "tensors_left_out": coverage.tensors_left_out,
            "left_out": list(coverage.left_out),
        }
        return report.with_part("coverage", tensors)


def _covered(coverage: worker_pb2.AdapterCoverage) -> str:
    used = coverage.tensors - coverage.tensors_left_out
    told = f"{len(coverage.modules)} of {coverage.layers} layers, by {used} of {coverage.tensors} tensors"
    left = coverage.tensors_left_out
    return told + (f"; {left} are for parts of the model that no text goes through" if left else "")
