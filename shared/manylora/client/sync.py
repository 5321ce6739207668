"""The blocking client: the asyncio client on an event loop of its own thread. Thread-safe; holds nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from manylora_shared.transport.base import Transport

from manylora.client.adapter_documents import ADD_TIMEOUT_S
from manylora.client.aio import (
    DEFAULT_SERVER,
    Client,
    GenerateOptions,
    Progress,
)
from manylora.client.answers import Event, Result
from manylora.client.caller import DEFAULT_TIMEOUT_S, closed
from manylora.client.cluster import (
    AdapterInfo,
    AdapterLine,
    AutoRollout,
    CheckedAdapter,
    ClusterStatus,
    DroppedCaches,
    GivenFeedback,
    KeyInfo,
    LiftedQuarantine,
    Models,
    PolicyChange,
    SamplesInfo,
    TenantInfo,
    VerifiedAdapter,
)
from manylora.client.prompts import Prompt
from manylora.client.retry import DEFAULT_RETRY, RetryPolicy
from manylora.client.streams.hedging import HedgePolicy
from manylora.client.streams.stream import GenerateStream

T = TypeVar("T")


class _LoopThread:
    """An event loop that runs in a daemon thread until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="manylora-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Interrupting the wait (Ctrl-C) cancels the coroutine."""
        if self.is_closed:
            work.close()
            raise closed()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            is_ended = future.cancelled()  # by `close`, in another thread
            future.cancel()
            if is_ended:
                raise closed() from None
            raise

    def call_soon(self, function: Callable[[], None]) -> None:
        if not self.is_closed:
            self._loop.call_soon_threadsafe(function)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Whoever waits in another thread is told that it is closed."""
        self.run(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncGenerateStream:
    """See GenerateStream. Leaving a `for` over it early cancels the request, too."""

    def __init__(self, thread: _LoopThread, stream: GenerateStream) -> None:
        self._thread = thread
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        try:
            while (event := next(self, None)) is not None:
                yield event
        finally:
            self.cancel()

    def __next__(self) -> Event:
        event = self._thread.run(_next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def collect(self) -> Result:
        return self._thread.run(self._stream.collect())

    def result(self) -> Result:
        return self._stream.result()

    def cancel(self) -> None:
        self._thread.call_soon(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class SyncTenants:
    """See Tenants."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread = thread
        self._tenants = client.tenants

    def apply(
        self, policy_yaml: str, *, expected_version: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, int]:
        return self._thread.run(
            self._tenants.apply(policy_yaml, expected_version=expected_version, timeout_s=timeout_s)
        )

    def diff(self, policy_yaml: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> PolicyChange:
        return self._thread.run(self._tenants.diff(policy_yaml, timeout_s=timeout_s))

    def get(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TenantInfo:
        return self._thread.run(self._tenants.get(tenant_id, timeout_s=timeout_s))

    def list(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[TenantInfo, ...]:
        return self._thread.run(self._tenants.list(timeout_s=timeout_s))

    def delete(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        return self._thread.run(self._tenants.delete(tenant_id, timeout_s=timeout_s))

    def lift_quarantine(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> LiftedQuarantine:
        return self._thread.run(self._tenants.lift_quarantine(tenant_id, timeout_s=timeout_s))


class SyncKeys:
    """See Keys."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread = thread
        self._keys = client.keys

    def create(
        self,
        scopes: Sequence[str] = (),
        *,
        role: str = "",
        tenant: str = "",
        name: str = "",
        lifetime_s: float = 0.0,
        networks: Sequence[str] = (),
        requests_per_min: int = 0,
        tokens_per_min: int = 0,
        concurrency: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[str, KeyInfo]:
        making = self._keys.create(
            scopes,
            role=role,
            tenant=tenant,
            name=name,
            lifetime_s=lifetime_s,
            networks=networks,
            requests_per_min=requests_per_min,
            tokens_per_min=tokens_per_min,
            concurrency=concurrency,
            timeout_s=timeout_s,
        )
        return self._thread.run(making)

    def rotate(
        self, key_id: str, *, overlap_s: float, lifetime_s: float = 0.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, KeyInfo, KeyInfo]:
        rotating = self._keys.rotate(key_id, overlap_s=overlap_s, lifetime_s=lifetime_s, timeout_s=timeout_s)
        return self._thread.run(rotating)

    def list(self, tenant: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[KeyInfo, ...]:
        return self._thread.run(self._keys.list(tenant, timeout_s=timeout_s))

    def revoke(self, key_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyInfo:
        return self._thread.run(self._keys.revoke(key_id, timeout_s=timeout_s))


class SyncAdapters:
    """See Adapters. `on_progress` is called on the client's thread."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread = thread
        self._adapters = client.adapters

    def add(
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
        return self._thread.run(
            self._adapters.add(
                tenant_id, name, path, pool=pool, rope=rope, on_progress=on_progress, timeout_s=timeout_s
            )
        )

    def add_from_store(
        self,
        tenant_id: str,
        name: str,
        store_path: str,
        *,
        pool: str = "",
        rope: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> AdapterInfo:
        adding = self._adapters.add_from_store(tenant_id, name, store_path, pool=pool, rope=rope, timeout_s=timeout_s)
        return self._thread.run(adding)

    def add_from_source(
        self,
        tenant_id: str,
        name: str,
        source: str,
        *,
        pool: str = "",
        rope: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> AdapterInfo:
        adding = self._adapters.add_from_source(tenant_id, name, source, pool=pool, rope=rope, timeout_s=timeout_s)
        return self._thread.run(adding)

    def list(self, tenant_id: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[AdapterInfo, ...]:
        return self._thread.run(self._adapters.list(tenant_id, timeout_s=timeout_s))

    def verify(
        self, tenant_id: str = "", name: str = "", *, timeout_s: float | None = None
    ) -> tuple[VerifiedAdapter, ...]:
        async def all_read() -> tuple[VerifiedAdapter, ...]:
            return tuple([each async for each in self._adapters.verify(tenant_id, name, timeout_s=timeout_s)])

        return self._thread.run(all_read())

    def rollout(
        self,
        tenant_id: str,
        name: str,
        *,
        to: int,
        percent: int = 0,
        sticky: str = "",
        auto: AutoRollout | None = None,
    ) -> AdapterLine:
        work = self._adapters.rollout(tenant_id, name, to=to, percent=percent, sticky=sticky, auto=auto)
        return self._thread.run(work)

    def promote(self, tenant_id: str, name: str, *, to: int = 0) -> AdapterLine:
        return self._thread.run(self._adapters.promote(tenant_id, name, to=to))

    def rollback(self, tenant_id: str, name: str) -> AdapterLine:
        return self._thread.run(self._adapters.rollback(tenant_id, name))

    def retire(self, tenant_id: str, name: str, number: int) -> AdapterLine:
        return self._thread.run(self._adapters.retire(tenant_id, name, number))

    def history(self, tenant_id: str, name: str) -> AdapterLine:
        return self._thread.run(self._adapters.history(tenant_id, name))

    def check(
        self,
        tenant_id: str,
        source: Path | str,
        *,
        name: str = "",
        samples: bytes = b"",
        judge: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> CheckedAdapter:
        checking = self._adapters.check(tenant_id, source, name=name, samples=samples, judge=judge, timeout_s=timeout_s)
        return self._thread.run(checking)

    def report(self, tenant_id: str, name: str, number: int = 0) -> tuple[AdapterInfo, dict[str, Any]]:
        return self._thread.run(self._adapters.report(tenant_id, name, number))

    def read(self, tenant_id: str, name: str, folder: Path, number: int = 0) -> AdapterInfo:
        return self._thread.run(self._adapters.read(tenant_id, name, folder, number))

    def put_samples(self, tenant_id: str, name: str, samples: bytes) -> SamplesInfo:
        return self._thread.run(self._adapters.put_samples(tenant_id, name, samples))

    def list_samples(self, tenant_id: str) -> tuple[SamplesInfo, ...]:
        return self._thread.run(self._adapters.list_samples(tenant_id))

    def remove_samples(self, tenant_id: str, name: str) -> None:
        self._thread.run(self._adapters.remove_samples(tenant_id, name))

    def remove(self, tenant_id: str, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._thread.run(self._adapters.remove(tenant_id, name, timeout_s=timeout_s))


class SyncClient:
    """See Client."""

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
        self._thread = _LoopThread()
        self._client = self._thread.run(_connect(server, key, tenant, retry, hedge, tls_ca, transport))
        self.tenants = SyncTenants(self._thread, self._client)
        self.keys = SyncKeys(self._thread, self._client)
        self.adapters = SyncAdapters(self._thread, self._client)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncGenerateStream:
        """Takes the options of Client.generate."""
        return SyncGenerateStream(self._thread, self._client.generate(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        return self._thread.run(self._client.complete(prompt, **options))

    def list_models(self, *, tenant: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Models:
        return self._thread.run(self._client.list_models(tenant=tenant, timeout_s=timeout_s))

    def feedback(
        self, request_id: str, score: float, *, tenant: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> GivenFeedback:
        return self._thread.run(self._client.feedback(request_id, score, tenant=tenant, timeout_s=timeout_s))

    def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ClusterStatus:
        return self._thread.run(self._client.status(timeout_s=timeout_s))

    def drain(self, instance_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        return self._thread.run(self._client.drain(instance_id, timeout_s=timeout_s))

    def drop_caches(
        self, worker_id: str, *, adapters: bool = True, prefixes: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> DroppedCaches:
        return self._thread.run(
            self._client.drop_caches(worker_id, adapters=adapters, prefixes=prefixes, timeout_s=timeout_s)
        )

    def wait_until_serving(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._thread.run(self._client.wait_until_serving(timeout_s))

    def close(self) -> None:
        """Idempotent."""
        if not self._thread.is_closed:
            self._thread.run(self._client.close())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _connect(
    server: str,
    key: str | None,
    tenant: str,
    retry: RetryPolicy | None,
    hedge: HedgePolicy | None,
    tls_ca: str | None,
    transport: Transport | None,
) -> Client:
    return Client(server, key=key, tenant=tenant, retry=retry, hedge=hedge, tls_ca=tls_ca, transport=transport)


async def _next(stream: GenerateStream) -> Event | None:
    return await anext(stream, None)


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
