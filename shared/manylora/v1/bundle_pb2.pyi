from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallBundle(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[CallPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[CallPart, _Mapping]]] = ...) -> None: ...

class CallPart(_message.Message):
    __slots__ = ("call", "open", "credit", "cancel", "bundles_ahead", "bundles_read")
    CALL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_READ_FIELD_NUMBER: _ClassVar[int]
    call: int
    open: CallOpen
    credit: int
    cancel: bool
    bundles_ahead: int
    bundles_read: int
    def __init__(self, call: _Optional[int] = ..., open: _Optional[_Union[CallOpen, _Mapping]] = ..., credit: _Optional[int] = ..., cancel: _Optional[bool] = ..., bundles_ahead: _Optional[int] = ..., bundles_read: _Optional[int] = ...) -> None: ...

class CallOpen(_message.Message):
    __slots__ = ("method", "metadata", "request", "credit")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    method: str
    metadata: _containers.ScalarMap[str, str]
    request: bytes
    credit: int
    def __init__(self, method: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., request: _Optional[bytes] = ..., credit: _Optional[int] = ...) -> None: ...

class AnswerBundle(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("call", "response", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    response: bytes
    end: CallEnd
    def __init__(self, call: _Optional[int] = ..., response: _Optional[bytes] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...
