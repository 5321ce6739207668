"""A router's public face without a cluster behind it: canned answers, and a record of what was asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from manylora.v1 import admin_pb2, common_pb2, data_pb2, inference_pb2, status_pb2, usage_pb2
from manylora_shared.audit.verify import Segment
from manylora_shared.coordination.records import AuditHeadRecord
from manylora_shared.errors import (
    AlreadyExists,
    FieldViolation,
    InvalidRequest,
    NoChatTemplate,
    NotFound,
    Overloaded,
    ServiceUnavailable,
    VersionConflict,
    WorkerLost,
)
from manylora_shared.stores.adapter_files import content_hasher
from manylora_shared.transport.base import ServerCall, Service

from tests.cli.test_adapter_page import REPORT

VERSION = "ab" * 32


UNIT_PRICES = [
    usage_pb2.UnitPrices(
        day="2026-10-01", from_unix_s=1_790_812_800.0, million_prompt_tokens=100_000_000, adapter_load=1_000
    ),
    usage_pb2.UnitPrices(
        day="2026-11-20", from_unix_s=1_795_132_800.0, million_prompt_tokens=200_000_000, gb_hour_kv=2_000_000_000
    ),
]


@dataclass
class FakeRouter:
    """Answers `generate` with the prompt in upper case, a word a frame. Some prompts fail on purpose (see `_fail`)."""

    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    times_left_s: list[float | None] = field(default_factory=list)
    keys: dict[str, admin_pb2.KeyInfo] = field(default_factory=dict)
    tenants: dict[str, tuple[str, int]] = field(default_factory=dict)
    adapters: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    store_paths: dict[tuple[str, str], str] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    checks: list[tuple[admin_pb2.AddAdapterHeader, dict[str, bytes]]] = field(default_factory=list)
    samples: dict[tuple[str, str], bytes] = field(default_factory=dict)
    line_changes: list[Any] = field(default_factory=list)
    has_no_prices: bool = False
    usage_asked: list[usage_pb2.GetUsageRequest] = field(default_factory=list)
    largest_chunk_bytes: int = 0
    failures_left: int = 0
    cancelled: int = 0
    has_chat_template: bool = False
    chats: list[list[tuple[str, str]]] = field(default_factory=list)
    scores: list[tuple[str, str, float]] = field(default_factory=list)  # tenant, request and score
    sealed: list[data_pb2.SealStoresResponse] = field(default_factory=list)
    is_sealing: bool = True
    audit_segments: list[Segment] = field(default_factory=list)
    audit_heads: list[AuditHeadRecord] = field(default_factory=list)
    silent_router_ids: list[str] = field(default_factory=list)
    kept: list[data_pb2.ExportTextsResponse] = field(default_factory=list)
    tells_tenant_alone: bool = False
    """Answers `get_status` as a router does to a key of a tenant."""

    def services(self) -> list[Service]:
        inference = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
        admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        data = Service(
            data_pb2.DESCRIPTOR.services_by_name["DataService"],
            {
                "GetEncryption": self.get_encryption,
                "RotateEncryption": self.rotate_encryption,
                "SealStores": self.seal_stores,
                "ExportTexts": self.export_texts,
                "EraseTexts": self.erase_texts,
            },
        )
        return [
            data,
            Service(
                inference,
                {"Generate": self.generate, "ListModels": self.list_models, "GiveFeedback": self.give_feedback},
            ),
            Service(
                admin,
                {
                    "ApplyTenant": self.apply_tenant,
                    "GetTenant": self.get_tenant,
                    "ListTenants": self.list_tenants,
                    "DeleteTenant": self.delete_tenant,
                    "AddAdapter": self.add_adapter,
                    "ListAdapters": self.list_adapters,
                    "RemoveAdapter": self.remove_adapter,
                    "VerifyAdapters": self.verify_adapters,
                    "CheckAdapter": self.check_adapter,
                    "GetAdapterReport": self.adapter_report,
                    "ReadAdapter": self.read_adapter,
                    "PutSamples": self.put_samples,
                    "ListSamples": self.list_samples,
                    "RemoveSamples": self.remove_samples,
                    "RolloutAdapter": self.change_line,
                    "PromoteAdapter": self.change_line,
                    "RollbackAdapter": self.change_line,
                    "RetireAdapter": self.change_line,
                    "GetAdapterLine": self.change_line,
                    "CreateKey": self.create_key,
                    "ListKeys": self.list_keys,
                    "ReadAudit": self.read_audit,
                    "RevokeKey": self.revoke_key,
                    "RotateKey": self.rotate_key,
                    "LiftQuarantine": self.lift_quarantine,
                    "Drain": self.drain,
                    "DropWorkerCaches": self.drop_worker_caches,
                    "GetStatus": self.get_status,
                    "GetUsage": self.get_usage,
                },
            ),
        ]

    async def get_usage(self, request: usage_pb2.GetUsageRequest, call: ServerCall) -> usage_pb2.GetUsageResponse:
        self.usage_asked.append(request)
        if request.unit_prices:
            return usage_pb2.GetUsageResponse(
                currency="EUR", price_list="public", unit_prices=[] if self.has_no_prices else UNIT_PRICES
            )
        amounts = {"prompt_tokens": 1234, "completion_tokens": 56, "price_nanos": 1_500_000, "kv_byte_seconds": 7.2e12}
        if request.by or request.total:
            fields = {"version": "adapter_version", "class": "qos_class"}
            words = {fields.get(name, name): "2026-11-25" if name == "day" else "acme" for name in request.by}
            return usage_pb2.GetUsageResponse(rows=[usage_pb2.UsageRow(requests=3, **words, **amounts)], currency="EUR")
        number = int(request.after or 0)
        row = usage_pb2.UsageRow(
            requests=1,
            request_id=f"r{number}",
            tenant="acme",
            adapter="=upper",
            ended_unix_s=1_795_564_800.0,
            **amounts,
        )
        return usage_pb2.GetUsageResponse(rows=[row], after=str(number + 1) if number < 2 else "")

    async def generate(
        self, request: inference_pb2.GenerateRequest, call: ServerCall
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.HasField("chat"):
            if not self.has_chat_template:
                raise NoChatTemplate("prompt.chat: the model's tokenizer has no chat template; send prompt.text")
            self.chats.append([(message.role, message.content) for message in request.chat.messages])
        self.requests.append(request)
        self.metadata.append(dict(call.metadata))
        self.times_left_s.append(call.time_remaining())
        prompt = request.chat.messages[-1].content if request.HasField("chat") else request.text
        self._fail(prompt)
        yield inference_pb2.GenerateResponse(
            frame=0,
            started=inference_pb2.Started(
                request_id="r-1", adapter="upper@1", adapter_version=VERSION, seed=7, prompt_tokens=3
            ),
        )
        try:
            async for response in self._answer(prompt, request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # wherever it finds the answer
            self.cancelled += 1
            raise

    async def _answer(
        self, prompt: str, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        words = prompt.upper().split()
        tokens = list(request.token_ids.ids)
        frame = 0
        for index, word in enumerate(words):
            frame = index + 1
            text = word if index == 0 else f" {word}"
            yield inference_pb2.GenerateResponse(
                frame=frame,
                delta=inference_pb2.Delta(choice=0, first_position=index, token_ids=[100 + index], text=text),
            )
            for choice in range(1, request.n):  # the others come mixed with the first
                delta = inference_pb2.Delta(choice=choice, first_position=index, token_ids=[7], text=text.lower())
                yield inference_pb2.GenerateResponse(frame=frame, delta=delta)
            if word == "DIE":
                yield _finished(frame + 1, common_pb2.OUTCOME_WORKER_LOST, frame)
                raise WorkerLost("worker w-1 was lost")
            if word == "HANG":
                await _never()
        if tokens:
            frame += 1
            yield inference_pb2.GenerateResponse(frame=frame, delta=inference_pb2.Delta(token_ids=tokens))
        yield _finished(frame + 1, common_pb2.OUTCOME_COMPLETED, len(words) + len(tokens))

    def _fail(self, text: str) -> None:
        if text == "":
            pass
        elif text == "two wrongs":
            raise InvalidRequest.of_all(
                [
                    FieldViolation("sampling.temperature", "must be at least 0"),
                    FieldViolation("max_tokens", "must be at most 5"),
                ]
            )
        elif text in ("overloaded", "overloaded for long"):
            retry_after_s = 60.0 if text.endswith("long") else 0.01
            if self._still_failing():
                raise Overloaded("the queue is full", retry_after_s=retry_after_s)
        elif text == "overloaded for ever" and self._still_failing():
            raise Overloaded("the quota is used up")
        elif text == "unavailable" and self._still_failing():
            raise ServiceUnavailable("no worker")

    def _still_failing(self) -> bool:
        self.failures_left -= 1
        return self.failures_left >= 0

    async def list_models(self, request: Any, call: ServerCall) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            base_model="tiny",
            max_context_tokens=64,
            adapters=["a", "b"],
            sampling_defaults=common_pb2.SamplingParams(temperature=0.6, top_k=20),
        )

    async def give_feedback(
        self, request: inference_pb2.GiveFeedbackRequest, call: ServerCall
    ) -> inference_pb2.GiveFeedbackResponse:
        if request.request_id == "gone":
            raise NotFound("request_id: no router remembers it")
        self.scores.append((call.metadata.get("x-tenant-id", ""), request.request_id, request.score))
        return inference_pb2.GiveFeedbackResponse(adapter="up@2", counted=request.request_id != "late")

    async def get_encryption(
        self, request: data_pb2.GetEncryptionRequest, call: ServerCall
    ) -> data_pb2.GetEncryptionResponse:
        if not self.is_sealing:
            return data_pb2.GetEncryptionResponse()
        return data_pb2.GetEncryptionResponse(on=True, wrapped_by="local-2", data_keys={"local-1": 1, "local-2": 3})

    async def export_texts(
        self, request: data_pb2.ExportTextsRequest, call: ServerCall
    ) -> AsyncIterator[data_pb2.ExportTextsResponse]:
        for each in self.kept:
            if request.user in ("", each.user):
                yield each

    async def erase_texts(self, request: data_pb2.EraseTextsRequest, call: ServerCall) -> data_pb2.EraseTextsResponse:
        gone = [each for each in self.kept if each.user == request.user]
        self.kept = [each for each in self.kept if each not in gone]
        return data_pb2.EraseTextsResponse(erased=len(gone))

    async def rotate_encryption(
        self, request: data_pb2.RotateEncryptionRequest, call: ServerCall
    ) -> data_pb2.RotateEncryptionResponse:
        return data_pb2.RotateEncryptionResponse(wrapped_by="local-3", rewrapped=4)

    async def seal_stores(
        self, request: data_pb2.SealStoresRequest, call: ServerCall
    ) -> AsyncIterator[data_pb2.SealStoresResponse]:
        for each in self.sealed:
            if request.tenant_id in ("", each.tenant_id):
                yield each

    async def apply_tenant(
        self, request: admin_pb2.ApplyTenantRequest, call: ServerCall
    ) -> admin_pb2.ApplyTenantResponse:
        if "very-bad" in request.policy_yaml:
            raise InvalidRequest.of_all([FieldViolation(f"field-{i}", f"line {i + 1}: {'x' * 80}") for i in range(30)])
        if "bad" in request.policy_yaml:
            raise InvalidRequest.of("classes.batch.weight", "line 2: must be a whole number")
        tenant_id = request.policy_yaml.split("tenant_id:")[1].split()[0].strip('"')
        before, version = self.tenants.get(tenant_id, ("", 0))
        if request.HasField("expected_version") and request.expected_version != version:
            raise VersionConflict(f"expected_version: tenant {tenant_id} is at version {version}")
        if not request.validate_only:
            version += 1
            self.tenants[tenant_id] = (request.policy_yaml, version)
        return admin_pb2.ApplyTenantResponse(
            tenant_id=tenant_id, version=version, policy_yaml=request.policy_yaml, previous_policy_yaml=before
        )

    async def get_tenant(self, request: admin_pb2.GetTenantRequest, call: ServerCall) -> admin_pb2.GetTenantResponse:
        return admin_pb2.GetTenantResponse(tenant=self._tenant(request.tenant_id))

    async def list_tenants(self, request: Any, call: ServerCall) -> admin_pb2.ListTenantsResponse:
        return admin_pb2.ListTenantsResponse(tenants=[self._tenant(t) for t in sorted(self.tenants)])

    async def delete_tenant(
        self, request: admin_pb2.DeleteTenantRequest, call: ServerCall
    ) -> admin_pb2.DeleteTenantResponse:
        removed = self._tenant(request.tenant_id)
        del self.tenants[request.tenant_id]
        return admin_pb2.DeleteTenantResponse(removed_adapters=removed.adapters)

    async def add_adapter(
        self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], call: ServerCall
    ) -> admin_pb2.AddAdapterResponse:
        files: dict[str, bytes] = {}
        header = (await anext(requests)).header
        key = (header.tenant_id, header.name)
        if key in self.adapters or key in self.store_paths:
            raise AlreadyExists(f"adapter {header.name}: exists")
        async for request in requests:
            chunk = request.chunk
            self.largest_chunk_bytes = max(self.largest_chunk_bytes, len(chunk.data))
            files[chunk.file_name] = files.get(chunk.file_name, b"") + chunk.data
        if header.store_path:
            self.store_paths[key] = header.store_path
        else:
            self.adapters[key] = files
        added = _adapter(*key)
        added.number = 2 if header.name == "retrained" else 1
        return admin_pb2.AddAdapterResponse(adapter=added)

    async def list_adapters(
        self, request: admin_pb2.ListAdaptersRequest, call: ServerCall
    ) -> admin_pb2.ListAdaptersResponse:
        keys = sorted(k for k in [*self.adapters, *self.store_paths] if request.tenant_id in ("", k[0]))
        return admin_pb2.ListAdaptersResponse(adapters=[_adapter(*k) for k in keys])

    async def remove_adapter(
        self, request: admin_pb2.RemoveAdapterRequest, call: ServerCall
    ) -> admin_pb2.RemoveAdapterResponse:
        if self.adapters.pop((request.tenant_id, request.name), None) is None:
            raise NotFound(f"adapter {request.name!r} is not known")
        return admin_pb2.RemoveAdapterResponse()

    async def verify_adapters(
        self, request: admin_pb2.VerifyAdaptersRequest, call: ServerCall
    ) -> AsyncIterator[admin_pb2.VerifyAdaptersResponse]:
        for tenant_id, name in sorted(self.adapters):
            if request.tenant_id in ("", tenant_id) and request.name in ("", name):
                problem = "adapter_config.json: is missing" if name in self.damaged else ""
                yield admin_pb2.VerifyAdaptersResponse(adapter=_adapter(tenant_id, name), problem=problem)

    async def check_adapter(
        self, requests: AsyncIterator[admin_pb2.CheckAdapterRequest], call: ServerCall
    ) -> admin_pb2.CheckAdapterResponse:
        header = (await anext(requests)).header
        files = {request.chunk.file_name: request.chunk.data async for request in requests}
        self.checks.append((header, files))
        report = {**REPORT, "name": header.name, "verdict": "rejected" if header.judge else "passed"}
        return admin_pb2.CheckAdapterResponse(report=json.dumps(report).encode(), passed=not header.judge)

    async def adapter_report(
        self, request: admin_pb2.GetAdapterReportRequest, call: ServerCall
    ) -> admin_pb2.GetAdapterReportResponse:
        adapter = _adapter(request.tenant_id, request.name)
        adapter.number = request.number or 7
        return admin_pb2.GetAdapterReportResponse(adapter=adapter, report=json.dumps(REPORT).encode())

    async def read_audit(
        self, request: admin_pb2.ReadAuditRequest, call: ServerCall
    ) -> AsyncIterator[admin_pb2.ReadAuditResponse]:
        heads = [admin_pb2.AuditHead(**dataclasses.asdict(head)) for head in self.audit_heads]
        yield admin_pb2.ReadAuditResponse(heads=heads)
        for segment in self.audit_segments:
            for data in (segment.data[:100], segment.data[100:]):
                part = admin_pb2.AuditPart(chain=segment.chain, number=segment.number, data=data)
                yield admin_pb2.ReadAuditResponse(part=part)
        for router_id in self.silent_router_ids:
            yield admin_pb2.ReadAuditResponse(silent_router_id=router_id)

    async def read_adapter(
        self, request: admin_pb2.ReadAdapterRequest, call: ServerCall
    ) -> AsyncIterator[admin_pb2.ReadAdapterResponse]:
        files = self.adapters[request.tenant_id, request.name]
        adapter = _adapter(request.tenant_id, request.name)
        digest = content_hasher(json.loads(files["adapter_config.json"]))
        digest.update(files["adapter_model.safetensors"])
        adapter.version = "0" * 64 if request.name in self.damaged else digest.hexdigest()
        yield admin_pb2.ReadAdapterResponse(adapter=adapter)
        for name, data in files.items():
            for first in range(0, len(data), 1 << 20):
                part = admin_pb2.FileChunk(file_name=name, data=data[first : first + (1 << 20)])
                yield admin_pb2.ReadAdapterResponse(chunk=part)

    async def put_samples(self, request: admin_pb2.PutSamplesRequest, call: ServerCall) -> admin_pb2.PutSamplesResponse:
        self.samples[request.tenant_id, request.name] = request.samples
        return admin_pb2.PutSamplesResponse(samples=admin_pb2.SamplesInfo(name=request.name, count=2))

    async def list_samples(
        self, request: admin_pb2.ListSamplesRequest, call: ServerCall
    ) -> admin_pb2.ListSamplesResponse:
        found = [n for tenant_id, n in self.samples if tenant_id == request.tenant_id]
        return admin_pb2.ListSamplesResponse(samples=[admin_pb2.SamplesInfo(name=n, size_bytes=5) for n in found])

    async def remove_samples(
        self, request: admin_pb2.RemoveSamplesRequest, call: ServerCall
    ) -> admin_pb2.RemoveSamplesResponse:
        del self.samples[request.tenant_id, request.name]
        return admin_pb2.RemoveSamplesResponse()

    async def change_line(self, request: Any, call: ServerCall) -> Any:
        self.line_changes.append(request)
        line = admin_pb2.AdapterLine(in_force=1, versions=[_adapter(request.tenant_id, request.name) for _ in range(3)])
        line.versions[1].number, line.versions[2].number, line.versions[2].retired_unix_s = 2, 3, 9.0
        line.rollout.CopyFrom(admin_pb2.AdapterRollout(to=2, percent=10, sticky="user"))
        if isinstance(request, admin_pb2.RolloutAdapterRequest) and request.HasField("auto"):
            line.rollout.auto.CopyFrom(request.auto)
        if isinstance(request, admin_pb2.GetAdapterLineRequest):
            line.rollout.progress.CopyFrom(
                admin_pb2.RolloutProgress(
                    canary_requests=7,
                    stable_requests=70,
                    evidence=2.5,
                    limit=100.0,
                    findings=[
                        admin_pb2.RolloutFinding(
                            name="errors", canary_share=0.25, canary_outcomes=8, stable_outcomes=80, evidence=9.0
                        )
                    ],
                )
            )
        line.events.add(at_unix_s=0.0, change="rollout", number=2, percent=10)
        line.events.add(at_unix_s=0.0, change="rollback", number=1, before=1, why="errors: many")
        return getattr(admin_pb2, type(request).__name__.replace("Request", "Response"))(line=line)

    async def create_key(self, request: admin_pb2.CreateKeyRequest, call: ServerCall) -> admin_pb2.CreateKeyResponse:
        key_id = f"{len(self.keys):016x}"
        info = admin_pb2.KeyInfo(
            key_id=key_id,
            tenant_id=request.tenant_id,
            scopes=request.scopes,
            role=request.role,
            requests_per_min=request.requests_per_min,
            tokens_per_min=request.tokens_per_min,
            name=request.name,
            created_unix_s=1.0,
        )
        self.keys[key_id] = info
        self.metadata.append(dict(call.metadata))
        return admin_pb2.CreateKeyResponse(key=f"mlk-{key_id}-{'5' * 64}", info=info)

    async def list_keys(self, request: admin_pb2.ListKeysRequest, call: ServerCall) -> admin_pb2.ListKeysResponse:
        found = [info for info in self.keys.values() if request.tenant_id in ("", info.tenant_id)]
        return admin_pb2.ListKeysResponse(keys=found)

    async def rotate_key(self, request: admin_pb2.RotateKeyRequest, call: ServerCall) -> admin_pb2.RotateKeyResponse:
        replaced = self.keys[request.key_id]
        replaced.expires_unix_s = request.overlap_s
        info = admin_pb2.KeyInfo(key_id="f" * 16, tenant_id=replaced.tenant_id, expires_unix_s=request.lifetime_s)
        return admin_pb2.RotateKeyResponse(key=f"mlk-{'f' * 16}-{'5' * 64}", info=info, replaced=replaced)

    async def revoke_key(self, request: admin_pb2.RevokeKeyRequest, call: ServerCall) -> admin_pb2.RevokeKeyResponse:
        if request.key_id not in self.keys:
            raise NotFound(f"key_id: key {request.key_id!r} is not known")
        self.keys[request.key_id].revoked_unix_s = 2.0
        return admin_pb2.RevokeKeyResponse(info=self.keys[request.key_id])

    async def lift_quarantine(
        self, request: admin_pb2.LiftQuarantineRequest, call: ServerCall
    ) -> admin_pb2.LiftQuarantineResponse:
        missed = ["r-2"] if request.tenant_id == "cedar" else []
        return admin_pb2.LiftQuarantineResponse(prompts=2, missed_router_ids=missed)

    async def drain(self, request: admin_pb2.DrainRequest, call: ServerCall) -> admin_pb2.DrainResponse:
        if request.id != "w-1":
            raise NotFound(f"id: no worker, router or leading scheduler is called {request.id!r}")
        return admin_pb2.DrainResponse(kind="worker")

    async def drop_worker_caches(
        self, request: admin_pb2.DropWorkerCachesRequest, call: ServerCall
    ) -> admin_pb2.DropWorkerCachesResponse:
        return admin_pb2.DropWorkerCachesResponse(
            adapters=3 * int(request.adapters), prefix_blocks=40 * request.prefixes
        )

    async def get_status(self, request: Any, call: ServerCall) -> admin_pb2.GetStatusResponse:
        if self.tells_tenant_alone:
            overload = admin_pb2.OverloadStatus(level=40, rung="batch_output")
            return admin_pb2.GetStatusResponse(
                base_model="tiny",
                scheduler=admin_pb2.SchedulerStatus(reachable=True, overload=overload),
                tenants=1,
                adapters=2,
            )
        return admin_pb2.GetStatusResponse(
            base_model="tiny",
            sampling_defaults=common_pb2.SamplingParams(temperature=0.6, top_k=20),
            scheduler=admin_pb2.SchedulerStatus(
                merge_advice=[
                    admin_pb2.MergeAdvice(
                        pool="default", tenant_id="acme", adapter="upper", requests_part=0.43, workers=1, pool_workers=3
                    )
                ],
                reachable=True,
                address="127.0.0.1:2",
                epoch=5,
                etcd=admin_pb2.EtcdSpace(used_bytes=3 << 20, quota_bytes=64 << 20),
                flows=[
                    admin_pb2.FlowStatus(
                        tenant_id="acme", qos_class=common_pb2.QOS_CLASS_BATCH, queued=2, running=1, oldest_wait_s=1.5
                    )
                ],
                quotas=[
                    admin_pb2.QuotaStatus(
                        tenant_id="acme",
                        qos_class=common_pb2.QOS_CLASS_BATCH,
                        requests=2,
                        leased_tokens=64,
                        settled_tokens=900,
                        level_tokens=-7,
                    ),
                    admin_pb2.QuotaStatus(
                        tenant_id="birch", qos_class=common_pb2.QOS_CLASS_STANDARD, requests=1, settled_tokens=50
                    ),
                ],
                overload=admin_pb2.OverloadStatus(
                    level=40,
                    rung="batch_output",
                    classes=[
                        admin_pb2.ClassOverload(
                            qos_class=common_pb2.QOS_CLASS_INTERACTIVE, late_part=0.125, target_ms=200.0
                        ),
                        admin_pb2.ClassOverload(
                            qos_class=common_pb2.QOS_CLASS_BATCH, refused_by_routers=30, refused=1, shed=4, capped=9
                        ),
                    ],
                    tenants=[
                        admin_pb2.TenantOverloadStatus(
                            tenant_id="acme", level=97, rung="interactive", demand_shares=3.5
                        )
                    ],
                ),
                neighbours=[
                    admin_pb2.NoisyNeighbour(
                        kind="kv_growth",
                        tenant_id="acme",
                        worker_id="w-1",
                        evidence={"kv_blocks": 12345.0, "kv_part": 0.75},
                    )
                ],
                kv=[admin_pb2.TenantKv(tenant_id="acme", device_bytes=3 << 19, most_bytes=1 << 20)],
                setbacks=[
                    status_pb2.TenantSetbacks(
                        tenant_id="birch", preemptions=11, swaps_out=4, evictions=2, recomputed_tokens=512
                    )
                ],
                adapters=[
                    status_pb2.TenantAdapters(
                        tenant_id="acme",
                        device_bytes=3 << 20,
                        host_bytes=5 << 19,
                        evictions=9,
                        displaced=1,
                        pins=[
                            status_pb2.PinStatus(name="upper", adapter_version=VERSION, workers=2, on_device=2),
                            status_pb2.PinStatus(name="lower", workers=2, problem="no adapter has this name"),
                            status_pb2.PinStatus(name="words", workers=2, on_device=1),
                        ],
                    ),
                    status_pb2.TenantAdapters(tenant_id="birch", device_bytes=1),
                ],
            ),
            workers=[
                admin_pb2.WorkerStatus(
                    worker_id="w-1",
                    address="127.0.0.1:3",
                    connected=True,
                    counters=status_pb2.WorkerCounters(
                        generated_tokens=2**40,
                        adapters_found_device=9,
                        adapters_found_store=1,
                        cold_starts_store=1,
                        cold_store_s=0.25,
                        guessed_tokens=12,
                        right_guesses=8,
                    ),
                    kv_blocks_total=32,
                    kv_blocks_free=20,
                    dedicated_tenant="acme",
                    dedicated_adapter="upper",
                    dedicated_version="ab" * 32,
                    merge_problem="no memory",
                ),
                admin_pb2.WorkerStatus(worker_id="w-2", address="127.0.0.1:4", kept_out="its dtype is another"),
            ],
            routers=[admin_pb2.RouterStatus(router_id="r-1", address="127.0.0.1:1", caps_without_effect=2)],
            tenants=len(self.tenants),
            slos=[
                admin_pb2.SloStatus(
                    tenant_id="acme",
                    qos_class=common_pb2.QOS_CLASS_INTERACTIVE,
                    requests=400,
                    failed=1,
                    availability=0.9975,
                    availability_target=0.99,
                    error_budget=0.75,
                    measured=399,
                    ttft_p50_ms=12.3,
                    ttft_p95_ms=240.0,
                    ttft_p95_target_ms=200,
                    ttft_met=False,
                ),
                admin_pb2.SloStatus(tenant_id="birch", qos_class=common_pb2.QOS_CLASS_BATCH, availability=1.0),
            ],
            circuits=[
                admin_pb2.CircuitStatus(
                    tenant_id="acme", adapter_version=VERSION, router_id="r-1", retry_after_s=1.5, openings=2
                )
            ],
            quarantined_prompts=3,
            resumed=7,
            quarantines=[admin_pb2.QuarantineStatus(tenant_id="birch", router_id="r-1", prompts=3, longest_s=299.6)],
            rollouts=_rollouts(),
        )

    def _tenant(self, tenant_id: str) -> admin_pb2.TenantInfo:
        if tenant_id not in self.tenants:
            raise NotFound(f"tenant {tenant_id!r} is not known")
        policy_yaml, version = self.tenants[tenant_id]
        count = sum(key[0] == tenant_id for key in self.adapters)
        return admin_pb2.TenantInfo(tenant_id=tenant_id, policy_yaml=policy_yaml, version=version, adapters=count)


def _adapter(tenant_id: str, name: str) -> admin_pb2.AdapterInfo:
    return admin_pb2.AdapterInfo(
        tenant_id=tenant_id,
        name=name,
        version=VERSION,
        max_lora_rank=8,
        size_bytes=318_376,
        target_modules=["k_proj", "q_proj"],
        created_unix_s=1_700_000_000.0,
        number=1,
    )


def _finished(frame: int, outcome: common_pb2.Outcome, tokens: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        frame=frame,
        finished=inference_pb2.Finished(
            outcome=outcome,
            choices=[inference_pb2.ChoiceEnd(choice=0, finish_reason=common_pb2.FINISH_REASON_STOP, stop_string="x")],
            usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=tokens),
            timings=common_pb2.Timings(queue_ms=0.5, ttft_ms=1.5, total_ms=2.5),
            worker_id="w-1",
        ),
    )


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def _rollouts() -> list[admin_pb2.RolloutStatus]:
    by_itself = admin_pb2.AdapterRollout(
        to=2,
        percent=10,
        sticky="user",
        auto=admin_pb2.AutoRollout(steps=[1, 10, 50], min_requests=200),
        progress=admin_pb2.RolloutProgress(canary_requests=7, stable_requests=90, evidence=2.5, limit=100.0),
    )
    by_hand = admin_pb2.AdapterRollout(to=2, percent=5, sticky="request")
    return [
        admin_pb2.RolloutStatus(tenant_id="acme", name="up", in_force=1, rollout=by_itself),
        admin_pb2.RolloutStatus(tenant_id="acme", name="down", in_force=1, rollout=by_hand),
    ]
