from google.protobuf import struct_pb2 as _struct_pb2
from manylora.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GiveFeedbackRequest(_message.Message):
    __slots__ = ("request_id", "score", "local_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    score: float
    local_only: bool
    def __init__(self, request_id: _Optional[str] = ..., score: _Optional[float] = ..., local_only: _Optional[bool] = ...) -> None: ...

class GiveFeedbackResponse(_message.Message):
    __slots__ = ("adapter", "counted")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    counted: bool
    def __init__(self, adapter: _Optional[str] = ..., counted: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "max_tokens", "sampling", "stop", "stop_token_ids", "ignore_eos", "n", "constraint", "resumable", "keep_s", "model", "resume")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    max_tokens: int
    sampling: _common_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    constraint: _common_pb2.Constraint
    resumable: bool
    keep_s: int
    model: str
    resume: Resume
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., resumable: _Optional[bool] = ..., keep_s: _Optional[int] = ..., model: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token", "next_frame", "emitted")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    token: str
    next_frame: int
    emitted: _containers.RepeatedCompositeFieldContainer[Emitted]
    def __init__(self, token: _Optional[str] = ..., next_frame: _Optional[int] = ..., emitted: _Optional[_Iterable[_Union[Emitted, _Mapping]]] = ...) -> None: ...

class Emitted(_message.Message):
    __slots__ = ("token_ids", "text_characters")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_characters: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text_characters: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "continue_final_message", "add_generation_prompt", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    continue_final_message: bool
    add_generation_prompt: bool
    chat_template_kwargs: _struct_pb2.Struct
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., continue_final_message: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("frame", "started", "prompt_logprobs", "delta", "finished")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    frame: int
    started: Started
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    delta: Delta
    finished: Finished
    def __init__(self, frame: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "adapter_version", "seed", "prompt_tokens", "degraded", "adapter", "resume_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter_version: str
    seed: int
    prompt_tokens: int
    degraded: Degraded
    adapter: str
    resume_token: str
    def __init__(self, request_id: _Optional[str] = ..., adapter_version: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., degraded: _Optional[_Union[Degraded, _Mapping]] = ..., adapter: _Optional[str] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Degraded(_message.Message):
    __slots__ = ("max_tokens", "asked_max_tokens", "overload_level", "pool", "asked_pool", "not_streamed")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_LEVEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ASKED_POOL_FIELD_NUMBER: _ClassVar[int]
    NOT_STREAMED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    asked_max_tokens: int
    overload_level: int
    pool: str
    asked_pool: str
    not_streamed: bool
    def __init__(self, max_tokens: _Optional[int] = ..., asked_max_tokens: _Optional[int] = ..., overload_level: _Optional[int] = ..., pool: _Optional[str] = ..., asked_pool: _Optional[str] = ..., not_streamed: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("choice", "first_position", "token_ids", "text", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, choice: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("outcome", "choices", "usage", "timings", "worker_id", "degraded")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    outcome: _common_pb2.Outcome
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceEnd]
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    worker_id: str
    degraded: Degraded
    def __init__(self, outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., choices: _Optional[_Iterable[_Union[ChoiceEnd, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., worker_id: _Optional[str] = ..., degraded: _Optional[_Union[Degraded, _Mapping]] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("choice", "finish_reason", "stop_string", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish_reason: _common_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("base_model", "max_context_tokens", "adapters", "sampling_defaults", "pools")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    max_context_tokens: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    sampling_defaults: _common_pb2.SamplingParams
    pools: _containers.RepeatedCompositeFieldContainer[PoolModel]
    def __init__(self, base_model: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., sampling_defaults: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolModel, _Mapping]]] = ...) -> None: ...

class PoolModel(_message.Message):
    __slots__ = ("name", "pool", "base_model", "max_context_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    base_model: str
    max_context_tokens: int
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., base_model: _Optional[str] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...
