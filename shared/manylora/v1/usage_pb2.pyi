from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetUsageRequest(_message.Message):
    __slots__ = ("tenant_id", "by", "total", "since_unix_s", "until_unix_s", "after", "limit", "unit_prices")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    UNIT_PRICES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    by: _containers.RepeatedScalarFieldContainer[str]
    total: bool
    since_unix_s: float
    until_unix_s: float
    after: str
    limit: int
    unit_prices: bool
    def __init__(self, tenant_id: _Optional[str] = ..., by: _Optional[_Iterable[str]] = ..., total: _Optional[bool] = ..., since_unix_s: _Optional[float] = ..., until_unix_s: _Optional[float] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., unit_prices: _Optional[bool] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("rows", "after", "currency", "price_list", "unit_prices")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    PRICE_LIST_FIELD_NUMBER: _ClassVar[int]
    UNIT_PRICES_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[UsageRow]
    after: str
    currency: str
    price_list: str
    unit_prices: _containers.RepeatedCompositeFieldContainer[UnitPrices]
    def __init__(self, rows: _Optional[_Iterable[_Union[UsageRow, _Mapping]]] = ..., after: _Optional[str] = ..., currency: _Optional[str] = ..., price_list: _Optional[str] = ..., unit_prices: _Optional[_Iterable[_Union[UnitPrices, _Mapping]]] = ...) -> None: ...

class UnitPrices(_message.Message):
    __slots__ = ("day", "from_unix_s", "million_prompt_tokens", "million_cached_tokens", "million_completion_tokens", "gb_hour_kv", "gb_hour_adapter", "adapter_load")
    DAY_FIELD_NUMBER: _ClassVar[int]
    FROM_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MILLION_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MILLION_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MILLION_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GB_HOUR_KV_FIELD_NUMBER: _ClassVar[int]
    GB_HOUR_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_FIELD_NUMBER: _ClassVar[int]
    day: str
    from_unix_s: float
    million_prompt_tokens: int
    million_cached_tokens: int
    million_completion_tokens: int
    gb_hour_kv: int
    gb_hour_adapter: int
    adapter_load: int
    def __init__(self, day: _Optional[str] = ..., from_unix_s: _Optional[float] = ..., million_prompt_tokens: _Optional[int] = ..., million_cached_tokens: _Optional[int] = ..., million_completion_tokens: _Optional[int] = ..., gb_hour_kv: _Optional[int] = ..., gb_hour_adapter: _Optional[int] = ..., adapter_load: _Optional[int] = ...) -> None: ...

class UsageRow(_message.Message):
    __slots__ = ("requests", "request_id", "tenant", "key", "qos_class", "pool", "model", "adapter", "adapter_version", "adapter_digest", "outcome", "day", "month", "degraded", "choices", "prompt_tokens", "cached_tokens", "completion_tokens", "unread_tokens", "reused_tokens", "resumes", "kv_byte_seconds", "adapter_byte_seconds", "adapter_loads", "prefill_flops", "decode_flops", "queue_ms", "ttft_ms", "duration_ms", "began_unix_s", "ended_unix_s", "trace_id", "router", "worker", "price_list", "price_nanos")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    MONTH_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FLOPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FLOPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PRICE_LIST_FIELD_NUMBER: _ClassVar[int]
    PRICE_NANOS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    request_id: str
    tenant: str
    key: str
    qos_class: str
    pool: str
    model: str
    adapter: str
    adapter_version: str
    adapter_digest: str
    outcome: str
    day: str
    month: str
    degraded: int
    choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    unread_tokens: int
    reused_tokens: int
    resumes: int
    kv_byte_seconds: float
    adapter_byte_seconds: float
    adapter_loads: int
    prefill_flops: float
    decode_flops: float
    queue_ms: float
    ttft_ms: float
    duration_ms: float
    began_unix_s: float
    ended_unix_s: float
    trace_id: str
    router: str
    worker: str
    price_list: str
    price_nanos: int
    def __init__(self, requests: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., key: _Optional[str] = ..., qos_class: _Optional[str] = ..., pool: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., outcome: _Optional[str] = ..., day: _Optional[str] = ..., month: _Optional[str] = ..., degraded: _Optional[int] = ..., choices: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., unread_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., resumes: _Optional[int] = ..., kv_byte_seconds: _Optional[float] = ..., adapter_byte_seconds: _Optional[float] = ..., adapter_loads: _Optional[int] = ..., prefill_flops: _Optional[float] = ..., decode_flops: _Optional[float] = ..., queue_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., began_unix_s: _Optional[float] = ..., ended_unix_s: _Optional[float] = ..., trace_id: _Optional[str] = ..., router: _Optional[str] = ..., worker: _Optional[str] = ..., price_list: _Optional[str] = ..., price_nanos: _Optional[int] = ...) -> None: ...
