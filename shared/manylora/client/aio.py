"""The asyncio client. Owns one channel to the routers; all methods may run concurrently."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from grpc_health.v1 import health_pb2
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import Code, RpcError
from manylora_shared.metadata import (
    ADAPTER_KEY,
    CLASS_KEY,
    CONVERSATION_KEY,
    IDEMPOTENCY_KEY,
    PRIORITY_KEY,
    TENANT_KEY,
    TRACEPARENT_KEY,
    USER_KEY,
)
from manylora_shared.sampling import Sampling
from manylora_shared.transport.base import Transport, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

from manylora.client.accounts.ledger import UsageLedger
from manylora.client.adapter_documents import ADD_TIMEOUT_S, AdapterDocuments
from manylora.client.answers import RequestFailed, Result
from manylora.client.caller import DEFAULT_TIMEOUT_S, Caller, printable
from manylora.client.cluster import (
    AdapterInfo,
    ClusterStatus,
    DroppedCaches,
    GivenFeedback,
    LiftedQuarantine,
    Models,
    PolicyChange,
    TenantInfo,
    VerifiedAdapter,
)
from manylora.client.credentials import find_ca, find_key, trusting
from manylora.client.folder import AdapterFolder, upload_parts
from manylora.client.keys import Audit, KeptTexts, Keys, Sealing
from manylora.client.messages import (
    adapter_from,
    change_from,
    lifted_from,
    models_from,
    status_from,
    tenant_from,
)
from manylora.client.prompts import Prompt, check_kind, message_of, refuse, set_chat_options, set_prompt
from manylora.client.retry import DEFAULT_RETRY, RetryPolicy
from manylora.client.routers import connect
from manylora.client.streams.hedging import HedgePolicy, Hedging
from manylora.client.streams.stream import GenerateStream
from manylora.v1 import admin_pb2, common_pb2, inference_pb2

DEFAULT_SERVER = "127.0.0.1:7070"

Progress = Callable[[int, int], None]  # called with (bytes sent, bytes in all)

_INFERENCE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])
_ADMIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
_HEALTH = methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"])


class GenerateOptions(TypedDict, total=False):
    """The keywords of Client.generate."""

    tenant: str
    adapter: str
    model: str
    qos_class: str
    priority: int | None
    max_tokens: int
    sampling: Sampling | None
    constraint: Constraint | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    continue_final_message: bool
    add_generation_prompt: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    timeout_s: float | None
    idempotency_key: str
    keep_s: int
    user: str
    conversation: str
    traceparent: str


class Tenants:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def apply(
        self, policy_yaml: str, *, expected_version: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, int]:
        """Creates or replaces one tenant's policy (one YAML document). Returns its tenant id and version.

        Args:
            expected_version: of the policy to be replaced, 0: none; where another stands it fails with ABORTED.
        """
        request = admin_pb2.ApplyTenantRequest(policy_yaml=policy_yaml, expected_version=expected_version)
        # A second try of an apply that was carried out would meet its own version.
        repeatable = expected_version is None
        answer = await self._caller.call(_ADMIN["ApplyTenant"], request, timeout_s=timeout_s, repeatable=repeatable)
        return answer.tenant_id, answer.version

    async def diff(self, policy_yaml: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> PolicyChange:
        """Checks the document as `apply` does, and changes nothing."""
        request = admin_pb2.ApplyTenantRequest(policy_yaml=policy_yaml, validate_only=True)
        return change_from(await self._caller.call(_ADMIN["ApplyTenant"], request, timeout_s=timeout_s))

    async def get(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TenantInfo:
        request = admin_pb2.GetTenantRequest(tenant_id=tenant_id)
        return tenant_from((await self._caller.call(_ADMIN["GetTenant"], request, timeout_s=timeout_s)).tenant)

    async def list(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[TenantInfo, ...]:
        answer = await self._caller.call(_ADMIN["ListTenants"], admin_pb2.ListTenantsRequest(), timeout_s=timeout_s)
        return tuple(tenant_from(t) for t in answer.tenants)

    async def delete(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Removes the policy and the tenant's adapters. Returns how many adapters went."""
        request = admin_pb2.DeleteTenantRequest(tenant_id=tenant_id)
        answer = await self._caller.call(_ADMIN["DeleteTenant"], request, timeout_s=timeout_s, repeatable=False)
        return int(answer.removed_adapters)

    async def lift_quarantine(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> LiftedQuarantine:
        """All routers run the tenant's quarantined prompts again."""
        request = admin_pb2.LiftQuarantineRequest(tenant_id=tenant_id)
        return lifted_from(await self._caller.call(_ADMIN["LiftQuarantine"], request, timeout_s=timeout_s))


class Adapters(AdapterDocuments):
    async def add(
        self,
        tenant_id: str,
        name: str,
        path: Path | str,
        *,
        pool: str = "",
        rope: str = "",
        on_progress: Progress | None = None,
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> AdapterInfo:
        """Uploads a PEFT folder, after the checks that need no server.

        Args:
            pool: for whose base model it is; empty: that of the name's other versions, else the policy's first.
            rope: JSON, the rotation of positions that it was trained with; empty: as its folder says, or the base
                model's.
        """
        folder = AdapterFolder.open(Path(path))
        header = admin_pb2.AddAdapterHeader(
            tenant_id=tenant_id,
            name=name,
            pool=pool,
            chat_template=folder.tokenizer.chat_template,
            added_tokens=folder.tokenizer.added_tokens,
            rope=rope or folder.tokenizer.rope,
        )
        return await self._add(header, folder, on_progress, timeout_s)

    async def add_from_store(
        self,
        tenant_id: str,
        name: str,
        store_path: str,
        *,
        pool: str = "",
        rope: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> AdapterInfo:
        """store_path: a folder in the cluster's adapter store already, relative to its root."""
        header = admin_pb2.AddAdapterHeader(tenant_id=tenant_id, name=name, store_path=store_path, pool=pool, rope=rope)
        return await self._add(header, None, None, timeout_s)

    async def add_from_source(
        self,
        tenant_id: str,
        name: str,
        source: str,
        *,
        pool: str = "",
        rope: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> AdapterInfo:
        """source: s3://BUCKET/PREFIX, https://HOST/PATH, hf://ORG/NAME[@REVISION], which a router reads."""
        header = admin_pb2.AddAdapterHeader(tenant_id=tenant_id, name=name, source=source, pool=pool, rope=rope)
        return await self._add(header, None, None, timeout_s)

    async def list(self, tenant_id: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[AdapterInfo, ...]:
        request = admin_pb2.ListAdaptersRequest(tenant_id=tenant_id)
        answer = await self._caller.call(_ADMIN["ListAdapters"], request, timeout_s=timeout_s)
        return tuple(adapter_from(a) for a in answer.adapters)

    async def remove(self, tenant_id: str, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        request = admin_pb2.RemoveAdapterRequest(tenant_id=tenant_id, name=name)
        await self._caller.call(_ADMIN["RemoveAdapter"], request, timeout_s=timeout_s, repeatable=False)

    async def verify(
        self, tenant_id: str = "", name: str = "", *, timeout_s: float | None = None
    ) -> AsyncIterator[VerifiedAdapter]:
        """Whether adapters' files in the adapter store are what was registered, each as it has been read."""
        self._caller.check_open()
        request = admin_pb2.VerifyAdaptersRequest(tenant_id=tenant_id, name=name)
        async for answer in self._caller.answers(_ADMIN["VerifyAdapters"], request, timeout_s=timeout_s):
            yield VerifiedAdapter(adapter_from(answer.adapter), answer.problem)

    async def _add(
        self,
        header: admin_pb2.AddAdapterHeader,
        folder: AdapterFolder | None,
        on_progress: Progress | None,
        timeout_s: float,
    ) -> AdapterInfo:
        def parts() -> Iterator[admin_pb2.AddAdapterRequest]:
            for message, sent_bytes in upload_parts(header, folder):
                yield message  # comes back when it is sent
                if on_progress is not None and folder is not None:
                    on_progress(sent_bytes, folder.size_bytes)

        answer = await self._caller.upload(_ADMIN["AddAdapter"], parts(), timeout_s=timeout_s)
        return adapter_from(answer.adapter)


class Client:
    """A connection to a cluster's router.

    Args:
        server: `host:port`, dialled at the first call and after a loss; or several, by commas: the next takes over.
        key: the API key; None: MANYLORA_KEY's, or the operator's key of the local cluster (`manylora up`) at this
            address; empty: none.
        tenant: of requests where a call names none. Only a gateway's key needs it.
        retry: see RetryPolicy; None switches it off, and going on with answers.
        hedge: see HedgePolicy; None: no call is sent twice at once. One with an idempotency key never is.
        tls_ca: the PEM file of who signs the server's certificate, or `system`: whom this machine trusts; None:
            MANYLORA_TLS_CA's, or the local cluster's; empty: plain text. ValueError where it cannot be read.
        transport: the default speaks gRPC.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        key: str | None = None,
        tenant: str = "",
        retry: RetryPolicy | None = DEFAULT_RETRY,
        hedge: HedgePolicy | None = None,
        tls_ca: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.server = server
        self.hedging = Hedging(hedge) if hedge is not None else None
        self._tenant = tenant
        credentials = find_key(server) if key is None else key
        transport = transport or GrpcTransport(tls=trusting(find_ca(server) if tls_ca is None else tls_ca))
        self._caller = Caller(server, connect(transport, server), credentials, retry, random.Random())
        self.tenants = Tenants(self._caller)
        self.keys = Keys(self._caller)
        self.encryption = Sealing(self._caller)
        self.audit = Audit(self._caller)
        self.texts = KeptTexts(self._caller)
        self.adapters = Adapters(self._caller)
        self.usage = UsageLedger(self._caller)

    def generate(
        self,
        prompt: Prompt,
        *,
        tenant: str = "",
        adapter: str = "",
        model: str = "",
        qos_class: str = "",
        priority: int | None = None,
        max_tokens: int = 0,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        n: int = 1,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        idempotency_key: str = "",
        keep_s: int = 0,
        user: str = "",
        conversation: str = "",
        traceparent: str = "",
    ) -> GenerateStream:
        """Starts one request when the stream is first read. An answer whose router is lost goes on at another one.

        Args:
            adapter: its name in the tenant's namespace; empty: the base model.
            model: a base model's or a pool's name; empty: the adapter's, else the first pool of the tenant's policy.
            qos_class: interactive, standard or batch; empty: the server's default.
            max_tokens: per choice; 0: the server's default.
            constraint: of each choice's text.
            continue_final_message: the answer goes on with the last chat message, the assistant's.
            add_generation_prompt: whether the template opens the assistant's turn; None: unless the last goes on.
            chat_template_kwargs: further variables of the chat template, such as enable_thinking.
            timeout_s: of the whole request, attempts and queueing included.
            idempotency_key: another call with it joins this one, or gets its answer again.
            keep_s: the answer goes on for so long without its caller, and a `cancel` ends it no sooner; 0: it ends.
            user, conversation: who keeps an adapter's version in a rollout; a user's kept texts can be erased.
        """
        check_kind("timeout_s", timeout_s, int, float)
        can_go_on = self._caller.retry is not None and self._caller.retry.resume_s > 0
        given = {
            "resumable": can_go_on and getattr(sampling, "prompt_logprobs", None) is None,
            "keep_s": keep_s,
            "max_tokens": max_tokens,
            "stop": [stop] if isinstance(stop, str) else stop,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": ignore_eos,
            "n": n,
            "model": model,
        }
        request = message_of(inference_pb2.GenerateRequest, given)
        _set_sampling(request, sampling, constraint)
        set_prompt(request, prompt)
        set_chat_options(
            request,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        metadata = _metadata(
            tenant=tenant or self._tenant, qos_class=qos_class, adapter=adapter, priority=priority,
            idempotency_key=idempotency_key, user=user, conversation=conversation, traceparent=traceparent,
        )  # fmt: skip
        return GenerateStream(self._caller, request, metadata, timeout_s, None if idempotency_key else self.hedging)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """`generate`, read to the end."""
        async with self.generate(prompt, **options) as stream:
            return await stream.collect()

    async def list_models(self, *, tenant: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Models:
        metadata = _metadata(tenant=tenant or self._tenant)
        request = inference_pb2.ListModelsRequest()
        return models_from(
            await self._caller.call(_INFERENCE["ListModels"], request, timeout_s=timeout_s, metadata=metadata)
        )

    async def feedback(
        self, request_id: str, score: float, *, tenant: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> GivenFeedback:
        """How good an answer was, from 0 to 1. Fails with NOT_FOUND where no router remembers the request."""
        request = inference_pb2.GiveFeedbackRequest(request_id=request_id, score=score)
        metadata = _metadata(tenant=tenant or self._tenant)
        answer = await self._caller.call(_INFERENCE["GiveFeedback"], request, timeout_s=timeout_s, metadata=metadata)
        return GivenFeedback(answer.adapter, answer.counted)

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ClusterStatus:
        return status_from(
            await self._caller.call(_ADMIN["GetStatus"], admin_pb2.GetStatusRequest(), timeout_s=timeout_s)
        )

    async def drain(self, instance_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Lets a worker, a router or a scheduler end in order. Returns which it is, once it is told."""
        request = admin_pb2.DrainRequest(id=instance_id)
        answer = await self._caller.call(_ADMIN["Drain"], request, timeout_s=timeout_s, repeatable=False)
        return str(answer.kind)

    async def drop_caches(
        self, worker_id: str, *, adapters: bool = True, prefixes: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> DroppedCaches:
        """What runs, what is waited for and what is pinned stays."""
        request = admin_pb2.DropWorkerCachesRequest(worker_id=worker_id, adapters=adapters, prefixes=prefixes)
        answer = await self._caller.call(_ADMIN["DropWorkerCaches"], request, timeout_s=timeout_s)
        return DroppedCaches(answer.adapters, answer.prefix_blocks)

    async def wait_until_serving(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Raises RequestFailed with DEADLINE_EXCEEDED where the server's health never says SERVING."""
        self._caller.check_open()
        deadline = time.monotonic() + timeout_s
        last = "no answer yet"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                answer = await self._caller.channel.call(
                    _HEALTH["Check"], health_pb2.HealthCheckRequest(), timeout=min(2.0, left_s)
                )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            except RpcError as error:
                last = str(error)
            await asyncio.sleep(0.05)
        raise RequestFailed(Code.DEADLINE_EXCEEDED.name, f"{self.server} was not serving in {timeout_s:g} s: {last}")

    async def close(self) -> None:
        self._caller.is_closed = True
        await self._caller.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _set_sampling(
    request: inference_pb2.GenerateRequest, sampling: Sampling | None, constraint: Constraint | None
) -> None:
    check_kind("sampling", sampling, Sampling)
    check_kind("constraint", constraint, Constraint)
    if sampling is not None:
        request.sampling.CopyFrom(message_of(common_pb2.SamplingParams, sampling.given(), "sampling."))
    if constraint is not None:
        refuse(constraint.violations())
        request.constraint.CopyFrom(common_pb2.Constraint(**constraint.given()))


def _metadata(
    *,
    tenant: str,
    qos_class: str = "",
    adapter: str = "",
    priority: int | None = None,
    idempotency_key: str = "",
    user: str = "",
    conversation: str = "",
    traceparent: str = "",
) -> dict[str, str]:
    values = {
        TENANT_KEY: tenant,
        CLASS_KEY: qos_class,
        ADAPTER_KEY: adapter,
        PRIORITY_KEY: "" if priority is None else str(priority),
        IDEMPOTENCY_KEY: idempotency_key,
        USER_KEY: user,
        CONVERSATION_KEY: conversation,
        TRACEPARENT_KEY: traceparent,
    }
    return printable({key: value for key, value in values.items() if value})
