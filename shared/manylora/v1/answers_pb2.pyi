from manylora.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadAnswerRequest(_message.Message):
    __slots__ = ("tenant_id", "request_id", "idempotency_key", "part", "fingerprint", "next_frame", "emitted")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    request_id: str
    idempotency_key: str
    part: int
    fingerprint: bytes
    next_frame: int
    emitted: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Emitted]
    def __init__(self, tenant_id: _Optional[str] = ..., request_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., part: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., next_frame: _Optional[int] = ..., emitted: _Optional[_Iterable[_Union[_inference_pb2.Emitted, _Mapping]]] = ...) -> None: ...

class ReadAnswerResponse(_message.Message):
    __slots__ = ("frame", "prompt")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    frame: _inference_pb2.GenerateResponse
    prompt: _inference_pb2.TokenIds
    def __init__(self, frame: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ..., prompt: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ...) -> None: ...
