"""Adapters on their way into the adapter store: files become an object there once they are complete and validated.

Owns the uploads that run now. Knows nothing of the registrations, which are AdminServicer's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from manylora.v1 import admin_pb2, worker_pb2
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import (
    Code,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    PermissionDenied,
    RpcError,
    ServiceUnavailable,
    shown,
)
from manylora_shared.ids import AdapterDigest, AdapterName, TenantId, name_problem
from manylora_shared.process.clock import WallClock
from manylora_shared.stores.adapter_files import FILE_NAMES, AdapterFiles
from manylora_shared.stores.adapter_rope import rope_text
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.adapter_gate import Judge
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.transport.base import methods_of
from manylora_shared.transport.places import Places

from manylora_router.admin.sources import MAX_READS, Sources
from manylora_router.links.channels import WorkerChannels
from manylora_router.links.directory import Directory
from manylora_router.quality.samples import MAX_SAMPLES_BYTES
from manylora_router.text.service import TextService
from manylora_router.text.texts import Texts

_LOG = logging.getLogger(__name__)
_VALIDATE_ADAPTER = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["ValidateAdapter"]

MAX_UPLOADS = MAX_READS  # of one router, at a time
KEPT_UPLOADS = 8  # of these, for tenants that have none
UPLOAD_IDLE_S = 60.0  # an upload that is waited for so long in all, beside the time that its bytes take, is given up
SLOWEST_BYTES_PER_S = 64 * 1024
UPLOAD_BYTES_PER_S = 128 << 20  # of a tenant, in all
_VALIDATE_TIMEOUT_S = 300.0
SAMPLES_NAME = "samples.jsonl"
UploadPart = admin_pb2.AddAdapterRequest | admin_pb2.CheckAdapterRequest


class AdapterRefused(InvalidRequest):
    """By a worker. stage: of the report, in which it was."""

    def __init__(self, message: str, *, violations: Sequence[FieldViolation], stage: str) -> None:
        super().__init__(message, violations=violations)
        self.stage = stage

    @classmethod
    def by(cls, answer: worker_pb2.ValidateAdapterResponse) -> AdapterRefused:
        found = [FieldViolation(p.field, p.description) for p in answer.problems]
        told = "; ".join(f"{v.field}: {v.description}" for v in found)
        is_format = any(v.field in FILE_NAMES for v in found)
        return cls(told, violations=found, stage="trial" if answer.was_tried else _STAGES[is_format])


_STAGES = {True: "format", False: "compatibility"}


@dataclass(frozen=True)
class Taken:
    """An adapter whose files are in the store, and which a worker found good."""

    record: AdapterRecord
    coverage: worker_pb2.AdapterCoverage
    samples: bytes  # of a check; empty: none came


class AdapterIntake:
    def __init__(
        self,
        files: AdapterFiles,
        sources: Sources,
        *,
        directory: Directory,
        texts: Texts,
        channels: WorkerChannels,
        clock: WallClock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._files = files
        self._sources = sources
        self._texts = texts
        self._channels = channels
        self._clock = clock
        self._rng = rng
        self._uploads = Places(MAX_UPLOADS, kept=KEPT_UPLOADS, few=1)

    @property
    def num_uploads(self) -> int:
        return self._uploads.num_held

    async def read_header(
        self, requests: AsyncIterator[UploadPart], caller: Principal, *, needs_name: bool = True
    ) -> admin_pb2.AddAdapterHeader:
        """Fills in its tenant. Raises PermissionDenied and InvalidRequest."""
        first = await self._next(requests)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest.of("header", "must be the first message")
        header = first.header
        header.tenant_id = caller.require_tenant(header.tenant_id)
        if header.store_path and caller.tenant_id is not None:
            # The adapter store's folders are of all tenants, so the answer is the same whatever lies there.
            raise PermissionDenied(
                "header.store_path: only an operator's key takes adapters from the adapter store; upload the files"
            )
        if header.source:
            if header.store_path:
                raise InvalidRequest.of("header.source", "goes not with header.store_path")
            self._sources.rule_for(header.source, header.tenant_id, is_operator=caller.tenant_id is None)
        wrong = [
            FieldViolation(f"header.{name}", problem)
            for name, value in (("tenant_id", header.tenant_id), ("name", header.name))
            if (value or needs_name or name == "tenant_id") and (problem := name_problem(value))
        ]
        if header.judge and header.judge not in tuple(Judge):
            wrong.append(FieldViolation("header.judge", f"must be one of {', '.join(Judge)}"))
        if header.rope:
            try:
                header.rope = rope_text(header.rope)
            except InvalidRequest as e:
                wrong += [FieldViolation("header.rope", each.description) for each in e.violations]
        if wrong:
            raise InvalidRequest.of_all(wrong)
        return header

    def place(self, tenant_id: str) -> AbstractContextManager[None]:
        """Of an upload. Raises Overloaded where as many run already as the tenant may have."""
        return self._uploads.held(f"tenant {tenant_id} that add an adapter")

    async def take_in(
        self,
        header: admin_pb2.AddAdapterHeader,
        requests: AsyncIterator[UploadPart],
        *,
        is_operator: bool,
        takes_samples: bool = False,
    ) -> Taken:
        """Brings the files into the adapter store, if a worker finds them good.

        Raises:
            InvalidRequest: with all that is wrong; AdapterRefused where a worker says so.
            DeadlineExceeded: the files come too slowly.
            ServiceUnavailable: no worker answers, or no source.
        """
        pool = self._pool_for(header)
        text = await self._texts.of(pool)
        incoming = await self._files.begin(TenantId(header.tenant_id))
        samples = bytearray() if takes_samples else None
        try:
            if header.store_path:
                await self._receive(requests, None, samples)
                brought = await self._files.import_from(incoming, header.store_path)
            elif header.source:
                await self._receive(requests, None, samples)
                brought = await self._sources.bring(
                    header.source, header.tenant_id, is_operator=is_operator, files=self._files, incoming=incoming
                )
            else:
                brought = BroughtTokenizer(header.chat_template, header.added_tokens)
            await _check(text, brought)
            if not (header.store_path or header.source):
                await self._receive(requests, incoming, samples)
            if rope := header.rope or brought.rope:
                await self._files.put_rope(incoming, rope)
            digest = await self._files.finish(incoming)
            record, coverage = await self._validate(header, incoming, digest, pool)
            await self._files.commit(incoming, digest)
            return Taken(record, coverage, bytes(samples or b""))
        finally:
            # Shielded: a caller that goes away must not leave its files behind.
            await asyncio.shield(self._files.discard(incoming))

    def _pool_for(self, header: admin_pb2.AddAdapterHeader) -> str:
        """Raises InvalidRequest."""
        line = self._directory.line_of(TenantId(header.tenant_id), AdapterName(header.name))
        if line is not None:
            pool = line.in_force.pool
            if header.pool not in ("", pool):
                raise InvalidRequest.of("header.pool", f"the other versions of {header.name} are of pool {pool}")
            return pool
        policy = self._directory.policy_of(TenantId(header.tenant_id)) or TenantPolicy(TenantId(header.tenant_id))
        if header.pool and header.pool not in policy.pools:
            raise InvalidRequest.of("header.pool", f"{shown(header.pool)} is not known to this tenant")
        return header.pool or policy.pools[0]

    async def _receive(
        self, requests: AsyncIterator[UploadPart], incoming: str | None, samples: bytearray | None
    ) -> None:
        """incoming: None: no files are to come. samples: None: no samples."""
        loop, waited_s, received_bytes = asyncio.get_running_loop(), 0.0, 0
        while True:
            asked_at = loop.time()
            left_s = UPLOAD_IDLE_S + received_bytes / SLOWEST_BYTES_PER_S - waited_s
            message = await self._next(requests, min(UPLOAD_IDLE_S, left_s))
            waited_s += loop.time() - asked_at
            if message is None:
                return
            if message.WhichOneof("part") != "chunk":
                raise InvalidRequest.of("chunk", "must be every message after the first")
            received_bytes += len(message.chunk.data)
            if samples is not None and message.chunk.file_name == SAMPLES_NAME:
                samples += message.chunk.data
                if len(samples) > MAX_SAMPLES_BYTES:
                    raise InvalidRequest.of(SAMPLES_NAME, f"has more than {MAX_SAMPLES_BYTES} bytes")
            elif incoming is None:
                raise InvalidRequest.of("chunk", "must not be sent with header.store_path or header.source")
            else:
                await self._files.append(incoming, message.chunk.file_name, message.chunk.data)

    async def _next(self, requests: AsyncIterator[UploadPart], within_s: float = UPLOAD_IDLE_S) -> UploadPart | None:
        try:
            async with asyncio.timeout(within_s):
                return await anext(requests, None)
        except TimeoutError:
            told = f"more than {UPLOAD_IDLE_S:g} seconds behind {SLOWEST_BYTES_PER_S // 1024} KiB a second"
            raise DeadlineExceeded(f"the upload is {told}") from None

    async def _validate(
        self, header: admin_pb2.AddAdapterHeader, incoming: str, digest: AdapterDigest, pool: str
    ) -> tuple[AdapterRecord, worker_pb2.AdapterCoverage]:
        """Raises AdapterRefused with all that is wrong, ServiceUnavailable where no worker answers."""
        tenant_id = TenantId(header.tenant_id)
        policy = self._directory.policy_of(tenant_id) or TenantPolicy(tenant_id)  # where it is not heard of yet
        answer = await self._ask_worker(
            pool,
            worker_pb2.ValidateAdapterRequest(path=incoming, tenant_id=tenant_id, adapter_uid=policy.copy_of(digest)),
        )
        model = self._directory.models.get(pool)
        if answer.problems:
            raise AdapterRefused.by(answer)
        record = AdapterRecord(
            tenant_id=header.tenant_id,
            name=header.name,
            uid=digest,
            max_lora_rank=answer.max_lora_rank,
            size_bytes=answer.size_bytes,
            target_modules=tuple(answer.target_modules),
            created_unix_s=self._clock.now_unix_s(),
            pool=pool,
            base_digest=model.digest if model is not None else "",
            rope=answer.rope,
            max_context_tokens=answer.max_context_tokens,
            goes_alone=answer.goes_alone,
        )
        return record, answer.coverage

    async def _ask_worker(
        self, pool: str, request: worker_pb2.ValidateAdapterRequest
    ) -> worker_pb2.ValidateAdapterResponse:
        workers = self._directory.workers_of(pool)
        self._rng.shuffle(workers)
        for worker in workers:
            channel = self._channels.acquire(worker.address)
            try:
                answer: worker_pb2.ValidateAdapterResponse = await channel.call(
                    _VALIDATE_ADAPTER, request, timeout=_VALIDATE_TIMEOUT_S
                )
                return answer
            except RpcError as e:
                if e.code is Code.INVALID_ARGUMENT:
                    raise InvalidRequest(e.message, violations=e.violations) from e
                _LOG.warning("a worker could not validate", extra=fields(worker=worker.worker_id, error=str(e)))
            finally:
                self._channels.release(worker.address)
        raise ServiceUnavailable("no worker could validate the adapter", retry_after_s=1.0)


async def _check(text: TextService, brought: BroughtTokenizer) -> None:
    if problems := await text.differences(brought):
        raise InvalidRequest.of_all(problems)
