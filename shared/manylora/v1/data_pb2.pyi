from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetEncryptionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEncryptionResponse(_message.Message):
    __slots__ = ("on", "wrapped_by", "data_keys")
    class DataKeysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ON_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_BY_FIELD_NUMBER: _ClassVar[int]
    DATA_KEYS_FIELD_NUMBER: _ClassVar[int]
    on: bool
    wrapped_by: str
    data_keys: _containers.ScalarMap[str, int]
    def __init__(self, on: _Optional[bool] = ..., wrapped_by: _Optional[str] = ..., data_keys: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RotateEncryptionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateEncryptionResponse(_message.Message):
    __slots__ = ("wrapped_by", "rewrapped", "forgotten")
    WRAPPED_BY_FIELD_NUMBER: _ClassVar[int]
    REWRAPPED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    wrapped_by: str
    rewrapped: int
    forgotten: bool
    def __init__(self, wrapped_by: _Optional[str] = ..., rewrapped: _Optional[int] = ..., forgotten: _Optional[bool] = ...) -> None: ...

class SealStoresRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class SealStoresResponse(_message.Message):
    __slots__ = ("tenant_id", "what", "problem")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    what: str
    problem: str
    def __init__(self, tenant_id: _Optional[str] = ..., what: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class ExportTextsRequest(_message.Message):
    __slots__ = ("tenant_id", "user")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user: str
    def __init__(self, tenant_id: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class ExportTextsResponse(_message.Message):
    __slots__ = ("request_id", "at_unix_s", "user", "adapter", "prompt", "answers", "whole")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    at_unix_s: float
    user: str
    adapter: str
    prompt: str
    answers: _containers.RepeatedScalarFieldContainer[str]
    whole: bool
    def __init__(self, request_id: _Optional[str] = ..., at_unix_s: _Optional[float] = ..., user: _Optional[str] = ..., adapter: _Optional[str] = ..., prompt: _Optional[str] = ..., answers: _Optional[_Iterable[str]] = ..., whole: _Optional[bool] = ...) -> None: ...

class EraseTextsRequest(_message.Message):
    __slots__ = ("tenant_id", "user")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    user: str
    def __init__(self, tenant_id: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class EraseTextsResponse(_message.Message):
    __slots__ = ("erased",)
    ERASED_FIELD_NUMBER: _ClassVar[int]
    erased: int
    def __init__(self, erased: _Optional[int] = ...) -> None: ...
