"""The public client: `Client` (asyncio) and `SyncClient`, over the stubs of `manylora.v1`.

    async with Client("127.0.0.1:7070", tenant="acme") as client:
        async with client.generate("do:ab3=", adapter="upper", max_tokens=32) as stream:
            async for event in stream:
                ...
        result = await client.complete("do:ab3=", adapter="upper")

A key is taken from MANYLORA_KEY or from the local cluster at the address, where the client is given none.

Every failure of a request is a `RequestFailed` with the status's code, message, field violations and retry hint. The
client holds one connection and no other state: it may be shared by any number of tasks (SyncClient: threads).
"""

from manylora.client.aio import Client, GenerateStream
from manylora.client.folder import AdapterFolder
from manylora.client.retry import DEFAULT_RETRY, RetryBudget, RetryPolicy
from manylora.client.sync import SyncClient, SyncGenerateStream
from manylora.client.types import (
    AdapterInfo,
    Choice,
    CircuitStatus,
    ClassOverload,
    ClusterStatus,
    Degraded,
    Delta,
    Event,
    FieldViolation,
    Finished,
    FlowStatus,
    KeyInfo,
    Models,
    NoisyNeighbour,
    OverloadStatus,
    PinStatus,
    PolicyChange,
    PositionLogprobs,
    QuotaBreach,
    QuotaStatus,
    RequestFailed,
    Result,
    RouterStatus,
    Sampling,
    SchedulerStatus,
    SloStatus,
    Started,
    TenantAdapters,
    TenantInfo,
    TenantOverload,
    Timings,
    Usage,
    WorkerStatus,
)

__all__ = [
    "DEFAULT_RETRY",
    "AdapterFolder",
    "AdapterInfo",
    "Choice",
    "CircuitStatus",
    "ClassOverload",
    "Client",
    "ClusterStatus",
    "Degraded",
    "Delta",
    "Event",
    "FieldViolation",
    "Finished",
    "FlowStatus",
    "GenerateStream",
    "KeyInfo",
    "Models",
    "NoisyNeighbour",
    "OverloadStatus",
    "PinStatus",
    "PolicyChange",
    "PositionLogprobs",
    "QuotaBreach",
    "QuotaStatus",
    "RequestFailed",
    "Result",
    "RetryBudget",
    "RetryPolicy",
    "RouterStatus",
    "Sampling",
    "SchedulerStatus",
    "SloStatus",
    "Started",
    "SyncClient",
    "SyncGenerateStream",
    "TenantAdapters",
    "TenantInfo",
    "TenantOverload",
    "Timings",
    "Usage",
    "WorkerStatus",
]
