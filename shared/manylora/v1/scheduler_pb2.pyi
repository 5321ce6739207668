from manylora.v1 import common_pb2 as _common_pb2
from manylora.v1 import admin_pb2 as _admin_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScheduleRequest(_message.Message):
    __slots__ = ("hello", "enqueue", "withdraw", "grant_closed", "lease_wanted", "settled", "refused", "trial_counts", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENQUEUE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    GRANT_CLOSED_FIELD_NUMBER: _ClassVar[int]
    LEASE_WANTED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TRIAL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    enqueue: Enqueue
    withdraw: Withdraw
    grant_closed: GrantClosed
    lease_wanted: LeaseWanted
    settled: Settled
    refused: Refused
    trial_counts: TrialCounts
    more: _containers.RepeatedCompositeFieldContainer[ScheduleRequest]
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., enqueue: _Optional[_Union[Enqueue, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., grant_closed: _Optional[_Union[GrantClosed, _Mapping]] = ..., lease_wanted: _Optional[_Union[LeaseWanted, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., trial_counts: _Optional[_Union[TrialCounts, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ScheduleRequest, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "leases")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    def __init__(self, router_id: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("request_id", "tenant_id", "qos_class", "tokens", "max_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_id: str
    qos_class: _common_pb2.QosClass
    tokens: int
    max_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class LeaseWanted(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("request_id", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("flows", "pool")
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    flows: _containers.RepeatedCompositeFieldContainer[FlowRefusals]
    pool: str
    def __init__(self, flows: _Optional[_Iterable[_Union[FlowRefusals, _Mapping]]] = ..., pool: _Optional[str] = ...) -> None: ...

class FlowRefusals(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "requests")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    requests: int
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., requests: _Optional[int] = ...) -> None: ...

class TrialCounts(_message.Message):
    __slots__ = ("tenant_id", "name", "trial", "canary", "stable")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    trial: str
    canary: VersionCounts
    stable: VersionCounts
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., trial: _Optional[str] = ..., canary: _Optional[_Union[VersionCounts, _Mapping]] = ..., stable: _Optional[_Union[VersionCounts, _Mapping]] = ...) -> None: ...

class VersionCounts(_message.Message):
    __slots__ = ("completed", "failed", "cut", "cold", "warm", "token", "scores")
    class ColdEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class WarmEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class TokenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ScoresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    completed: int
    failed: int
    cut: int
    cold: _containers.ScalarMap[int, int]
    warm: _containers.ScalarMap[int, int]
    token: _containers.ScalarMap[int, int]
    scores: _containers.ScalarMap[int, int]
    def __init__(self, completed: _Optional[int] = ..., failed: _Optional[int] = ..., cut: _Optional[int] = ..., cold: _Optional[_Mapping[int, int]] = ..., warm: _Optional[_Mapping[int, int]] = ..., token: _Optional[_Mapping[int, int]] = ..., scores: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Enqueue(_message.Message):
    __slots__ = ("request_id", "tenant_id", "qos_class", "priority", "adapter_uid", "prompt_tokens", "max_new_tokens", "sequences", "timeout_s", "traceparent", "adapter_id", "resumed", "pool", "key", "adapter_rank")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_id: str
    qos_class: _common_pb2.QosClass
    priority: int
    adapter_uid: str
    prompt_tokens: int
    max_new_tokens: int
    sequences: int
    timeout_s: float
    traceparent: str
    adapter_id: str
    resumed: bool
    pool: str
    key: KeyLimits
    adapter_rank: int
    def __init__(self, request_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., priority: _Optional[int] = ..., adapter_uid: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., timeout_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., adapter_id: _Optional[str] = ..., resumed: _Optional[bool] = ..., pool: _Optional[str] = ..., key: _Optional[_Union[KeyLimits, _Mapping]] = ..., adapter_rank: _Optional[int] = ...) -> None: ...

class KeyLimits(_message.Message):
    __slots__ = ("key_id", "requests_per_min", "tokens_per_min", "concurrency")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    requests_per_min: int
    tokens_per_min: int
    concurrency: int
    def __init__(self, key_id: _Optional[str] = ..., requests_per_min: _Optional[int] = ..., tokens_per_min: _Optional[int] = ..., concurrency: _Optional[int] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GrantClosed(_message.Message):
    __slots__ = ("request_id", "worker_id", "reached_worker", "worker_unavailable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REACHED_WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker_id: str
    reached_worker: bool
    worker_unavailable: bool
    def __init__(self, request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., reached_worker: _Optional[bool] = ..., worker_unavailable: _Optional[bool] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("hello", "grant", "refusal", "lease", "lease_refused", "overload", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    grant: Grant
    refusal: Refusal
    lease: Lease
    lease_refused: LeaseRefused
    overload: Overload
    more: _containers.RepeatedCompositeFieldContainer[ScheduleResponse]
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., lease_refused: _Optional[_Union[LeaseRefused, _Mapping]] = ..., overload: _Optional[_Union[Overload, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ScheduleResponse, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("request_id", "tokens", "levels")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    levels: _containers.RepeatedCompositeFieldContainer[QuotaLevel]
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ..., levels: _Optional[_Iterable[_Union[QuotaLevel, _Mapping]]] = ...) -> None: ...

class QuotaLevel(_message.Message):
    __slots__ = ("quota", "limit", "left", "full_in_s")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FULL_IN_S_FIELD_NUMBER: _ClassVar[int]
    quota: str
    limit: int
    left: int
    full_in_s: float
    def __init__(self, quota: _Optional[str] = ..., limit: _Optional[int] = ..., left: _Optional[int] = ..., full_in_s: _Optional[float] = ...) -> None: ...

class LeaseRefused(_message.Message):
    __slots__ = ("request_id", "message", "retry_after_s", "breaches")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BREACHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    message: str
    retry_after_s: float
    breaches: _containers.RepeatedCompositeFieldContainer[QuotaBreach]
    def __init__(self, request_id: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., breaches: _Optional[_Iterable[_Union[QuotaBreach, _Mapping]]] = ...) -> None: ...

class QuotaBreach(_message.Message):
    __slots__ = ("quota", "tenant_id", "limit", "description", "capacity")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    quota: str
    tenant_id: str
    limit: int
    description: str
    capacity: int
    def __init__(self, quota: _Optional[str] = ..., tenant_id: _Optional[str] = ..., limit: _Optional[int] = ..., description: _Optional[str] = ..., capacity: _Optional[int] = ...) -> None: ...

class Overload(_message.Message):
    __slots__ = ("level", "tenants", "limit_shares", "crowded", "pool")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SHARES_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    level: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantOverload]
    limit_shares: float
    crowded: bool
    pool: str
    def __init__(self, level: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantOverload, _Mapping]]] = ..., limit_shares: _Optional[float] = ..., crowded: _Optional[bool] = ..., pool: _Optional[str] = ...) -> None: ...

class TenantOverload(_message.Message):
    __slots__ = ("tenant_id", "level", "interactive_shares", "standard_shares", "batch_shares", "limit_shares")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    INTERACTIVE_SHARES_FIELD_NUMBER: _ClassVar[int]
    STANDARD_SHARES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHARES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SHARES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    level: int
    interactive_shares: float
    standard_shares: float
    batch_shares: float
    limit_shares: float
    def __init__(self, tenant_id: _Optional[str] = ..., level: _Optional[int] = ..., interactive_shares: _Optional[float] = ..., standard_shares: _Optional[float] = ..., batch_shares: _Optional[float] = ..., limit_shares: _Optional[float] = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("request_id", "worker_id", "worker_address", "epoch", "queue_ms", "max_output_tokens", "overload_level")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_LEVEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker_id: str
    worker_address: str
    epoch: int
    queue_ms: float
    max_output_tokens: int
    overload_level: int
    def __init__(self, request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., worker_address: _Optional[str] = ..., epoch: _Optional[int] = ..., queue_ms: _Optional[float] = ..., max_output_tokens: _Optional[int] = ..., overload_level: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("request_id", "code", "message", "retry_after_s", "breaches")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BREACHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: int
    message: str
    retry_after_s: float
    breaches: _containers.RepeatedCompositeFieldContainer[QuotaBreach]
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., breaches: _Optional[_Iterable[_Union[QuotaBreach, _Mapping]]] = ...) -> None: ...

class ResignRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResignResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSchedulerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSchedulerStatusResponse(_message.Message):
    __slots__ = ("scheduler", "workers")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    scheduler: _admin_pb2.SchedulerStatus
    workers: _containers.RepeatedCompositeFieldContainer[_admin_pb2.WorkerStatus]
    def __init__(self, scheduler: _Optional[_Union[_admin_pb2.SchedulerStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[_admin_pb2.WorkerStatus, _Mapping]]] = ...) -> None: ...
