from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerCounters(_message.Message):
    __slots__ = ("generated_tokens", "adapters_found_device", "adapters_found_host", "adapters_found_disk", "adapters_found_store", "cold_starts_host", "cold_starts_disk", "cold_starts_store", "cold_host_s", "cold_disk_s", "cold_store_s", "guessed_tokens", "right_guesses")
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FOUND_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FOUND_HOST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FOUND_DISK_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FOUND_STORE_FIELD_NUMBER: _ClassVar[int]
    COLD_STARTS_HOST_FIELD_NUMBER: _ClassVar[int]
    COLD_STARTS_DISK_FIELD_NUMBER: _ClassVar[int]
    COLD_STARTS_STORE_FIELD_NUMBER: _ClassVar[int]
    COLD_HOST_S_FIELD_NUMBER: _ClassVar[int]
    COLD_DISK_S_FIELD_NUMBER: _ClassVar[int]
    COLD_STORE_S_FIELD_NUMBER: _ClassVar[int]
    GUESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RIGHT_GUESSES_FIELD_NUMBER: _ClassVar[int]
    generated_tokens: int
    adapters_found_device: int
    adapters_found_host: int
    adapters_found_disk: int
    adapters_found_store: int
    cold_starts_host: int
    cold_starts_disk: int
    cold_starts_store: int
    cold_host_s: float
    cold_disk_s: float
    cold_store_s: float
    guessed_tokens: int
    right_guesses: int
    def __init__(self, generated_tokens: _Optional[int] = ..., adapters_found_device: _Optional[int] = ..., adapters_found_host: _Optional[int] = ..., adapters_found_disk: _Optional[int] = ..., adapters_found_store: _Optional[int] = ..., cold_starts_host: _Optional[int] = ..., cold_starts_disk: _Optional[int] = ..., cold_starts_store: _Optional[int] = ..., cold_host_s: _Optional[float] = ..., cold_disk_s: _Optional[float] = ..., cold_store_s: _Optional[float] = ..., guessed_tokens: _Optional[int] = ..., right_guesses: _Optional[int] = ...) -> None: ...

class TenantSetbacks(_message.Message):
    __slots__ = ("tenant_id", "preemptions", "swaps_out", "evictions", "recomputed_tokens")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_OUT_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    preemptions: int
    swaps_out: int
    evictions: int
    recomputed_tokens: int
    def __init__(self, tenant_id: _Optional[str] = ..., preemptions: _Optional[int] = ..., swaps_out: _Optional[int] = ..., evictions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class TenantAdapters(_message.Message):
    __slots__ = ("tenant_id", "device_bytes", "host_bytes", "evictions", "displaced", "pins")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    device_bytes: int
    host_bytes: int
    evictions: int
    displaced: int
    pins: _containers.RepeatedCompositeFieldContainer[PinStatus]
    def __init__(self, tenant_id: _Optional[str] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., evictions: _Optional[int] = ..., displaced: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinStatus, _Mapping]]] = ...) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("name", "adapter_version", "workers", "on_device", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    adapter_version: str
    workers: int
    on_device: int
    problem: str
    def __init__(self, name: _Optional[str] = ..., adapter_version: _Optional[str] = ..., workers: _Optional[int] = ..., on_device: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
