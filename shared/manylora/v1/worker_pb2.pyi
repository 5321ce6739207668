from manylora.v1 import common_pb2 as _common_pb2
from manylora.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_TIER_UNSPECIFIED: _ClassVar[AdapterTier]
    ADAPTER_TIER_HOST: _ClassVar[AdapterTier]
    ADAPTER_TIER_DEVICE: _ClassVar[AdapterTier]
ADAPTER_TIER_UNSPECIFIED: AdapterTier
ADAPTER_TIER_HOST: AdapterTier
ADAPTER_TIER_DEVICE: AdapterTier

class ExecuteRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "tenant_id", "qos_class", "adapter_uid", "prompt_token_ids", "max_tokens", "sampling", "stop_token_ids", "n", "bad_sequences", "constraint", "emitted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BAD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    tenant_id: str
    qos_class: _common_pb2.QosClass
    adapter_uid: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: _common_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    bad_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    constraint: _common_pb2.Constraint
    emitted: _containers.RepeatedCompositeFieldContainer[EmittedChoice]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., adapter_uid: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., bad_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., emitted: _Optional[_Iterable[_Union[EmittedChoice, _Mapping]]] = ...) -> None: ...

class EmittedChoice(_message.Message):
    __slots__ = ("token_ids", "has_ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., has_ended: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("frame", "started", "tokens", "finished")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    frame: int
    started: ExecuteStarted
    tokens: TokenChunk
    finished: ExecuteFinished
    def __init__(self, frame: _Optional[int] = ..., started: _Optional[_Union[ExecuteStarted, _Mapping]] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[ExecuteFinished, _Mapping]] = ...) -> None: ...

class ExecuteStarted(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterTier
    def __init__(self, adapter: _Optional[_Union[AdapterTier, str]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("choices", "prompt_logprobs")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceTokens]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, choices: _Optional[_Iterable[_Union[ChoiceTokens, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class ChoiceTokens(_message.Message):
    __slots__ = ("choice", "first_position", "token_ids", "logprobs", "finish_reason", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class ExecuteFinished(_message.Message):
    __slots__ = ("outcome", "message", "cached_prompt_tokens", "adapter_wait_ms", "prefill_ms", "decode_ms", "prompt_tokens", "output_tokens", "swaps", "evictions", "kv_byte_seconds", "adapter_byte_seconds")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    outcome: _common_pb2.Outcome
    message: str
    cached_prompt_tokens: int
    adapter_wait_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    output_tokens: int
    swaps: int
    evictions: int
    kv_byte_seconds: float
    adapter_byte_seconds: float
    def __init__(self, outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., message: _Optional[str] = ..., cached_prompt_tokens: _Optional[int] = ..., adapter_wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., swaps: _Optional[int] = ..., evictions: _Optional[int] = ..., kv_byte_seconds: _Optional[float] = ..., adapter_byte_seconds: _Optional[float] = ...) -> None: ...

class StopChoiceRequest(_message.Message):
    __slots__ = ("request_id", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class StopChoiceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class EndRequestResponse(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: ExecuteFinished
    def __init__(self, finished: _Optional[_Union[ExecuteFinished, _Mapping]] = ...) -> None: ...

class LeavePoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeavePoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropCachesRequest(_message.Message):
    __slots__ = ("adapters", "prefixes")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    adapters: bool
    prefixes: bool
    def __init__(self, adapters: _Optional[bool] = ..., prefixes: _Optional[bool] = ...) -> None: ...

class DropCachesResponse(_message.Message):
    __slots__ = ("adapters", "prefix_blocks")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    adapters: int
    prefix_blocks: int
    def __init__(self, adapters: _Optional[int] = ..., prefix_blocks: _Optional[int] = ...) -> None: ...

class ValidateAdapterRequest(_message.Message):
    __slots__ = ("path", "tenant_id", "adapter_uid")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    path: str
    tenant_id: str
    adapter_uid: str
    def __init__(self, path: _Optional[str] = ..., tenant_id: _Optional[str] = ..., adapter_uid: _Optional[str] = ...) -> None: ...

class ValidateAdapterResponse(_message.Message):
    __slots__ = ("problems", "max_lora_rank", "size_bytes", "target_modules", "coverage", "was_tried", "rope", "max_context_tokens", "goes_alone")
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    WAS_TRIED_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GOES_ALONE_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedCompositeFieldContainer[AdapterProblem]
    max_lora_rank: int
    size_bytes: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    coverage: AdapterCoverage
    was_tried: bool
    rope: str
    max_context_tokens: int
    goes_alone: bool
    def __init__(self, problems: _Optional[_Iterable[_Union[AdapterProblem, _Mapping]]] = ..., max_lora_rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., coverage: _Optional[_Union[AdapterCoverage, _Mapping]] = ..., was_tried: _Optional[bool] = ..., rope: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., goes_alone: _Optional[bool] = ...) -> None: ...

class AdapterCoverage(_message.Message):
    __slots__ = ("modules", "layers", "tensors", "tensors_left_out", "left_out")
    MODULES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.RepeatedCompositeFieldContainer[ChangedModule]
    layers: int
    tensors: int
    tensors_left_out: int
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, modules: _Optional[_Iterable[_Union[ChangedModule, _Mapping]]] = ..., layers: _Optional[int] = ..., tensors: _Optional[int] = ..., tensors_left_out: _Optional[int] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class ChangedModule(_message.Message):
    __slots__ = ("path", "rank")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    path: str
    rank: int
    def __init__(self, path: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class AdapterProblem(_message.Message):
    __slots__ = ("field", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    description: str
    def __init__(self, field: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class ControlCommand(_message.Message):
    __slots__ = ("hello", "prefetch", "drain", "dedicate")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DEDICATE_FIELD_NUMBER: _ClassVar[int]
    hello: ControlHello
    prefetch: PrefetchAdapter
    drain: Drain
    dedicate: Dedicate
    def __init__(self, hello: _Optional[_Union[ControlHello, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchAdapter, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., dedicate: _Optional[_Union[Dedicate, _Mapping]] = ...) -> None: ...

class ControlHello(_message.Message):
    __slots__ = ("epoch", "scheduler_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    scheduler_id: str
    def __init__(self, epoch: _Optional[int] = ..., scheduler_id: _Optional[str] = ...) -> None: ...

class PrefetchAdapter(_message.Message):
    __slots__ = ("adapter_uid", "tenant_id")
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_uid: str
    tenant_id: str
    def __init__(self, adapter_uid: _Optional[str] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Dedicate(_message.Message):
    __slots__ = ("adapter_uid", "tenant_id")
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_uid: str
    tenant_id: str
    def __init__(self, adapter_uid: _Optional[str] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class ControlReport(_message.Message):
    __slots__ = ("snapshot", "sequence_slots", "running_sequences", "kv_blocks_total", "kv_blocks_free", "block_size", "draining", "adapters", "started", "finished_request_ids", "flows", "max_sequences", "tenants", "setbacks", "kv_block_bytes", "tenant_adapters", "counters", "dedication")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SETBACKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DEDICATION_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    sequence_slots: int
    running_sequences: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int
    draining: bool
    adapters: _containers.RepeatedCompositeFieldContainer[ResidentAdapter]
    started: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    finished_request_ids: _containers.RepeatedScalarFieldContainer[str]
    flows: _containers.RepeatedCompositeFieldContainer[FlowCounter]
    max_sequences: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantKvBlocks]
    setbacks: _containers.RepeatedCompositeFieldContainer[_status_pb2.TenantSetbacks]
    kv_block_bytes: int
    tenant_adapters: _containers.RepeatedCompositeFieldContainer[_status_pb2.TenantAdapters]
    counters: _status_pb2.WorkerCounters
    dedication: Dedication
    def __init__(self, snapshot: _Optional[bool] = ..., sequence_slots: _Optional[int] = ..., running_sequences: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., block_size: _Optional[int] = ..., draining: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., finished_request_ids: _Optional[_Iterable[str]] = ..., flows: _Optional[_Iterable[_Union[FlowCounter, _Mapping]]] = ..., max_sequences: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantKvBlocks, _Mapping]]] = ..., setbacks: _Optional[_Iterable[_Union[_status_pb2.TenantSetbacks, _Mapping]]] = ..., kv_block_bytes: _Optional[int] = ..., tenant_adapters: _Optional[_Iterable[_Union[_status_pb2.TenantAdapters, _Mapping]]] = ..., counters: _Optional[_Union[_status_pb2.WorkerCounters, _Mapping]] = ..., dedication: _Optional[_Union[Dedication, _Mapping]] = ...) -> None: ...

class Dedication(_message.Message):
    __slots__ = ("adapter_uid", "tenant_id", "is_ready", "problem")
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    adapter_uid: str
    tenant_id: str
    is_ready: bool
    problem: str
    def __init__(self, adapter_uid: _Optional[str] = ..., tenant_id: _Optional[str] = ..., is_ready: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...

class RunningRequest(_message.Message):
    __slots__ = ("request_id", "tenant_id", "qos_class", "sequences")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_id: str
    qos_class: _common_pb2.QosClass
    sequences: int
    def __init__(self, request_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., sequences: _Optional[int] = ...) -> None: ...

class TenantKvBlocks(_message.Message):
    __slots__ = ("tenant_id", "kv_blocks")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    kv_blocks: int
    def __init__(self, tenant_id: _Optional[str] = ..., kv_blocks: _Optional[int] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("adapter_uid", "tier")
    ADAPTER_UID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    adapter_uid: str
    tier: AdapterTier
    def __init__(self, adapter_uid: _Optional[str] = ..., tier: _Optional[_Union[AdapterTier, str]] = ...) -> None: ...

class FlowCounter(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "prompt_tokens", "output_tokens", "slotted_sequences", "ready_sequences", "held_sequences")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    READY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HELD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    prompt_tokens: int
    output_tokens: int
    slotted_sequences: int
    ready_sequences: int
    held_sequences: int
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., slotted_sequences: _Optional[int] = ..., ready_sequences: _Optional[int] = ..., held_sequences: _Optional[int] = ...) -> None: ...
