"""The public client: `Client` (asyncio) and `SyncClient`, over the stubs of `manylora.v1`.

    async with Client("127.0.0.1:7070", tenant="acme") as client:
        async with client.generate("do:ab3=", adapter="upper", max_tokens=32) as stream:
            async for event in stream:
                ...
        result = await client.complete("do:ab3=", adapter="upper")

A failed request raises `RequestFailed`. A client holds one connection and no other state: any number of tasks
(SyncClient: threads) may share it.
"""

from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import FieldViolation, QuotaBreach
from manylora_shared.sampling import Sampling

from manylora.client.aio import Client, GenerateOptions
from manylora.client.answers import (
    Choice,
    Degraded,
    Delta,
    Event,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    RequestFailed,
    Result,
    Started,
    Timings,
    Usage,
)
from manylora.client.cluster import (
    AdapterEvent,
    AdapterInfo,
    AdapterLine,
    AdapterRollout,
    AutoRollout,
    CheckedAdapter,
    CircuitStatus,
    ClassOverload,
    ClusterStatus,
    DroppedCaches,
    EtcdSpace,
    FlowStatus,
    GivenFeedback,
    KeyInfo,
    LiftedQuarantine,
    MergeAdvice,
    Models,
    NoisyNeighbour,
    OverloadStatus,
    PinStatus,
    PolicyChange,
    PoolModel,
    PoolStatus,
    QuarantineStatus,
    QuotaStatus,
    RolloutFinding,
    RolloutProgress,
    RolloutStatus,
    RouterStatus,
    SamplesInfo,
    SchedulerStatus,
    SloStatus,
    TenantAdapters,
    TenantInfo,
    TenantKv,
    TenantOverload,
    TenantSetbacks,
    VerifiedAdapter,
    WorkerStatus,
)
from manylora.client.folder import AdapterFolder
from manylora.client.retry import DEFAULT_RETRY, RetryBudget, RetryPolicy
from manylora.client.streams.hedging import HedgePolicy
from manylora.client.streams.stream import GenerateStream
from manylora.client.sync import SyncClient, SyncGenerateStream

__all__ = [
    "DEFAULT_RETRY",
    "AdapterEvent",
    "AdapterFolder",
    "AdapterInfo",
    "AdapterLine",
    "AdapterRollout",
    "AutoRollout",
    "CheckedAdapter",
    "Choice",
    "CircuitStatus",
    "ClassOverload",
    "Client",
    "ClusterStatus",
    "Constraint",
    "Degraded",
    "Delta",
    "DroppedCaches",
    "EtcdSpace",
    "Event",
    "FieldViolation",
    "Finished",
    "FlowStatus",
    "GenerateOptions",
    "GenerateStream",
    "GivenFeedback",
    "HedgePolicy",
    "KeyInfo",
    "LiftedQuarantine",
    "MergeAdvice",
    "Models",
    "NoisyNeighbour",
    "OverloadStatus",
    "PinStatus",
    "PolicyChange",
    "PoolModel",
    "PoolStatus",
    "PositionLogprobs",
    "PromptLogprobs",
    "QuarantineStatus",
    "QuotaBreach",
    "QuotaStatus",
    "RequestFailed",
    "Result",
    "RetryBudget",
    "RetryPolicy",
    "RolloutFinding",
    "RolloutProgress",
    "RolloutStatus",
    "RouterStatus",
    "SamplesInfo",
    "Sampling",
    "SchedulerStatus",
    "SloStatus",
    "Started",
    "SyncClient",
    "SyncGenerateStream",
    "TenantAdapters",
    "TenantInfo",
    "TenantKv",
    "TenantOverload",
    "TenantSetbacks",
    "Timings",
    "Usage",
    "VerifiedAdapter",
    "WorkerStatus",
]
