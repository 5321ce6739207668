from manylora.v1 import common_pb2 as _common_pb2
from manylora.v1 import status_pb2 as _status_pb2
from manylora.v1 import usage_pb2 as _usage_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyTenantRequest(_message.Message):
    __slots__ = ("policy_yaml", "expected_version", "validate_only")
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    policy_yaml: str
    expected_version: int
    validate_only: bool
    def __init__(self, policy_yaml: _Optional[str] = ..., expected_version: _Optional[int] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class ApplyTenantResponse(_message.Message):
    __slots__ = ("tenant_id", "version", "policy_yaml", "previous_policy_yaml")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    version: int
    policy_yaml: str
    previous_policy_yaml: str
    def __init__(self, tenant_id: _Optional[str] = ..., version: _Optional[int] = ..., policy_yaml: _Optional[str] = ..., previous_policy_yaml: _Optional[str] = ...) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class GetTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: TenantInfo
    def __init__(self, tenant: _Optional[_Union[TenantInfo, _Mapping]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ...) -> None: ...

class DeleteTenantRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class DeleteTenantResponse(_message.Message):
    __slots__ = ("removed_adapters",)
    REMOVED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    removed_adapters: int
    def __init__(self, removed_adapters: _Optional[int] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("tenant_id", "policy_yaml", "version", "adapters", "problem")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    policy_yaml: str
    version: int
    adapters: int
    problem: str
    def __init__(self, tenant_id: _Optional[str] = ..., policy_yaml: _Optional[str] = ..., version: _Optional[int] = ..., adapters: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("tenant_id", "scopes", "name", "lifetime_s", "networks", "requests_per_min", "tokens_per_min", "concurrency", "role")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    NETWORKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    name: str
    lifetime_s: float
    networks: _containers.RepeatedScalarFieldContainer[str]
    requests_per_min: int
    tokens_per_min: int
    concurrency: int
    role: str
    def __init__(self, tenant_id: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., lifetime_s: _Optional[float] = ..., networks: _Optional[_Iterable[str]] = ..., requests_per_min: _Optional[int] = ..., tokens_per_min: _Optional[int] = ..., concurrency: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key", "info")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    key: str
    info: KeyInfo
    def __init__(self, key: _Optional[str] = ..., info: _Optional[_Union[KeyInfo, _Mapping]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: KeyInfo
    def __init__(self, info: _Optional[_Union[KeyInfo, _Mapping]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("key_id", "overlap_s", "lifetime_s")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_S_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    overlap_s: float
    lifetime_s: float
    def __init__(self, key_id: _Optional[str] = ..., overlap_s: _Optional[float] = ..., lifetime_s: _Optional[float] = ...) -> None: ...

class RotateKeyResponse(_message.Message):
    __slots__ = ("key", "info", "replaced")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    key: str
    info: KeyInfo
    replaced: KeyInfo
    def __init__(self, key: _Optional[str] = ..., info: _Optional[_Union[KeyInfo, _Mapping]] = ..., replaced: _Optional[_Union[KeyInfo, _Mapping]] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("key_id", "tenant_id", "scopes", "name", "created_unix_s", "revoked_unix_s", "expires_unix_s", "networks", "role", "requests_per_min", "tokens_per_min", "concurrency")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NETWORKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MIN_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    tenant_id: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    name: str
    created_unix_s: float
    revoked_unix_s: float
    expires_unix_s: float
    networks: _containers.RepeatedScalarFieldContainer[str]
    role: str
    requests_per_min: int
    tokens_per_min: int
    concurrency: int
    def __init__(self, key_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., created_unix_s: _Optional[float] = ..., revoked_unix_s: _Optional[float] = ..., expires_unix_s: _Optional[float] = ..., networks: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., requests_per_min: _Optional[int] = ..., tokens_per_min: _Optional[int] = ..., concurrency: _Optional[int] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: AddAdapterHeader
    chunk: FileChunk
    def __init__(self, header: _Optional[_Union[AddAdapterHeader, _Mapping]] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class AddAdapterHeader(_message.Message):
    __slots__ = ("tenant_id", "name", "store_path", "chat_template", "added_tokens", "only_new", "source", "pool", "judge", "rope")
    class AddedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STORE_PATH_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    store_path: str
    chat_template: str
    added_tokens: _containers.ScalarMap[str, int]
    only_new: bool
    source: str
    pool: str
    judge: str
    rope: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., store_path: _Optional[str] = ..., chat_template: _Optional[str] = ..., added_tokens: _Optional[_Mapping[str, int]] = ..., only_new: _Optional[bool] = ..., source: _Optional[str] = ..., pool: _Optional[str] = ..., judge: _Optional[str] = ..., rope: _Optional[str] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class AddAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ...) -> None: ...

class CheckAdapterRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: AddAdapterHeader
    chunk: FileChunk
    def __init__(self, header: _Optional[_Union[AddAdapterHeader, _Mapping]] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class CheckAdapterResponse(_message.Message):
    __slots__ = ("report", "passed")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    passed: bool
    def __init__(self, report: _Optional[bytes] = ..., passed: _Optional[bool] = ...) -> None: ...

class GetAdapterReportRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "number")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    number: int
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetAdapterReportResponse(_message.Message):
    __slots__ = ("adapter", "report")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    report: bytes
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ..., report: _Optional[bytes] = ...) -> None: ...

class ReadAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "number")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    number: int
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ReadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "chunk")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    chunk: FileChunk
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class PutSamplesRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "samples")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    samples: bytes
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., samples: _Optional[bytes] = ...) -> None: ...

class PutSamplesResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: SamplesInfo
    def __init__(self, samples: _Optional[_Union[SamplesInfo, _Mapping]] = ...) -> None: ...

class ListSamplesRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class ListSamplesResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SamplesInfo]
    def __init__(self, samples: _Optional[_Iterable[_Union[SamplesInfo, _Mapping]]] = ...) -> None: ...

class RemoveSamplesRequest(_message.Message):
    __slots__ = ("tenant_id", "name")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RemoveSamplesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplesInfo(_message.Message):
    __slots__ = ("name", "size_bytes", "changed_unix_s", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    changed_unix_s: float
    count: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., changed_unix_s: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyAdaptersRequest(_message.Message):
    __slots__ = ("tenant_id", "name")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class VerifyAdaptersResponse(_message.Message):
    __slots__ = ("adapter", "problem")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    problem: str
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("tenant_id", "name", "version", "max_lora_rank", "size_bytes", "target_modules", "created_unix_s", "number", "retired_unix_s", "state", "report", "pool", "rope", "max_context_tokens")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RETIRED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    version: str
    max_lora_rank: int
    size_bytes: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    created_unix_s: float
    number: int
    retired_unix_s: float
    state: str
    report: str
    pool: str
    rope: str
    max_context_tokens: int
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., max_lora_rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., created_unix_s: _Optional[float] = ..., number: _Optional[int] = ..., retired_unix_s: _Optional[float] = ..., state: _Optional[str] = ..., report: _Optional[str] = ..., pool: _Optional[str] = ..., rope: _Optional[str] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class RolloutAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "to", "percent", "sticky", "auto")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    STICKY_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    to: int
    percent: int
    sticky: str
    auto: AutoRollout
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., to: _Optional[int] = ..., percent: _Optional[int] = ..., sticky: _Optional[str] = ..., auto: _Optional[_Union[AutoRollout, _Mapping]] = ...) -> None: ...

class AutoRollout(_message.Message):
    __slots__ = ("steps", "min_requests", "step_limit_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    min_requests: int
    step_limit_s: float
    def __init__(self, steps: _Optional[_Iterable[int]] = ..., min_requests: _Optional[int] = ..., step_limit_s: _Optional[float] = ...) -> None: ...

class RolloutAdapterResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: AdapterLine
    def __init__(self, line: _Optional[_Union[AdapterLine, _Mapping]] = ...) -> None: ...

class PromoteAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "to")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    to: int
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., to: _Optional[int] = ...) -> None: ...

class PromoteAdapterResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: AdapterLine
    def __init__(self, line: _Optional[_Union[AdapterLine, _Mapping]] = ...) -> None: ...

class RollbackAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RollbackAdapterResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: AdapterLine
    def __init__(self, line: _Optional[_Union[AdapterLine, _Mapping]] = ...) -> None: ...

class RetireAdapterRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "number")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    number: int
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class RetireAdapterResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: AdapterLine
    def __init__(self, line: _Optional[_Union[AdapterLine, _Mapping]] = ...) -> None: ...

class GetAdapterLineRequest(_message.Message):
    __slots__ = ("tenant_id", "name")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetAdapterLineResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: AdapterLine
    def __init__(self, line: _Optional[_Union[AdapterLine, _Mapping]] = ...) -> None: ...

class AdapterLine(_message.Message):
    __slots__ = ("versions", "in_force", "rollout", "events")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    in_force: int
    rollout: AdapterRollout
    events: _containers.RepeatedCompositeFieldContainer[AdapterEvent]
    def __init__(self, versions: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., in_force: _Optional[int] = ..., rollout: _Optional[_Union[AdapterRollout, _Mapping]] = ..., events: _Optional[_Iterable[_Union[AdapterEvent, _Mapping]]] = ...) -> None: ...

class AdapterRollout(_message.Message):
    __slots__ = ("to", "percent", "sticky", "auto", "progress")
    TO_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    STICKY_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    to: int
    percent: int
    sticky: str
    auto: AutoRollout
    progress: RolloutProgress
    def __init__(self, to: _Optional[int] = ..., percent: _Optional[int] = ..., sticky: _Optional[str] = ..., auto: _Optional[_Union[AutoRollout, _Mapping]] = ..., progress: _Optional[_Union[RolloutProgress, _Mapping]] = ...) -> None: ...

class RolloutProgress(_message.Message):
    __slots__ = ("canary_requests", "stable_requests", "evidence", "limit", "findings")
    CANARY_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STABLE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    canary_requests: int
    stable_requests: int
    evidence: float
    limit: float
    findings: _containers.RepeatedCompositeFieldContainer[RolloutFinding]
    def __init__(self, canary_requests: _Optional[int] = ..., stable_requests: _Optional[int] = ..., evidence: _Optional[float] = ..., limit: _Optional[float] = ..., findings: _Optional[_Iterable[_Union[RolloutFinding, _Mapping]]] = ...) -> None: ...

class RolloutFinding(_message.Message):
    __slots__ = ("name", "canary_share", "canary_outcomes", "stable_share", "stable_outcomes", "evidence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CANARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    CANARY_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STABLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    STABLE_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    canary_share: float
    canary_outcomes: int
    stable_share: float
    stable_outcomes: int
    evidence: float
    def __init__(self, name: _Optional[str] = ..., canary_share: _Optional[float] = ..., canary_outcomes: _Optional[int] = ..., stable_share: _Optional[float] = ..., stable_outcomes: _Optional[int] = ..., evidence: _Optional[float] = ...) -> None: ...

class AdapterEvent(_message.Message):
    __slots__ = ("at_unix_s", "change", "number", "before", "percent", "why")
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    at_unix_s: float
    change: str
    number: int
    before: int
    percent: int
    why: str
    def __init__(self, at_unix_s: _Optional[float] = ..., change: _Optional[str] = ..., number: _Optional[int] = ..., before: _Optional[int] = ..., percent: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class LiftQuarantineRequest(_message.Message):
    __slots__ = ("tenant_id", "local_only")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    local_only: bool
    def __init__(self, tenant_id: _Optional[str] = ..., local_only: _Optional[bool] = ...) -> None: ...

class LiftQuarantineResponse(_message.Message):
    __slots__ = ("prompts", "missed_router_ids")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MISSED_ROUTER_IDS_FIELD_NUMBER: _ClassVar[int]
    prompts: int
    missed_router_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompts: _Optional[int] = ..., missed_router_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadAuditRequest(_message.Message):
    __slots__ = ("last", "local_only")
    LAST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    last: int
    local_only: bool
    def __init__(self, last: _Optional[int] = ..., local_only: _Optional[bool] = ...) -> None: ...

class ReadAuditResponse(_message.Message):
    __slots__ = ("heads", "part", "silent_router_id")
    HEADS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SILENT_ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[AuditHead]
    part: AuditPart
    silent_router_id: str
    def __init__(self, heads: _Optional[_Iterable[_Union[AuditHead, _Mapping]]] = ..., part: _Optional[_Union[AuditPart, _Mapping]] = ..., silent_router_id: _Optional[str] = ...) -> None: ...

class AuditHead(_message.Message):
    __slots__ = ("chain", "seq", "hash", "service", "at_unix_s", "public_key", "signature")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    chain: str
    seq: int
    hash: str
    service: str
    at_unix_s: float
    public_key: str
    signature: str
    def __init__(self, chain: _Optional[str] = ..., seq: _Optional[int] = ..., hash: _Optional[str] = ..., service: _Optional[str] = ..., at_unix_s: _Optional[float] = ..., public_key: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class AuditPart(_message.Message):
    __slots__ = ("chain", "number", "data", "shown")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    chain: str
    number: int
    data: bytes
    shown: bytes
    def __init__(self, chain: _Optional[str] = ..., number: _Optional[int] = ..., data: _Optional[bytes] = ..., shown: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("kind",)
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: str
    def __init__(self, kind: _Optional[str] = ...) -> None: ...

class DropWorkerCachesRequest(_message.Message):
    __slots__ = ("worker_id", "adapters", "prefixes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    adapters: bool
    prefixes: bool
    def __init__(self, worker_id: _Optional[str] = ..., adapters: _Optional[bool] = ..., prefixes: _Optional[bool] = ...) -> None: ...

class DropWorkerCachesResponse(_message.Message):
    __slots__ = ("adapters", "prefix_blocks")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    adapters: int
    prefix_blocks: int
    def __init__(self, adapters: _Optional[int] = ..., prefix_blocks: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("local_only",)
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    local_only: bool
    def __init__(self, local_only: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("base_model", "scheduler", "workers", "routers", "tenants", "adapters", "slos", "slo_counts", "circuits", "quarantined_prompts", "sampling_defaults", "quarantines", "resumed", "rollouts")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SLOS_FIELD_NUMBER: _ClassVar[int]
    SLO_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    scheduler: SchedulerStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    tenants: int
    adapters: int
    slos: _containers.RepeatedCompositeFieldContainer[SloStatus]
    slo_counts: _containers.RepeatedCompositeFieldContainer[SloCounts]
    circuits: _containers.RepeatedCompositeFieldContainer[CircuitStatus]
    quarantined_prompts: int
    sampling_defaults: _common_pb2.SamplingParams
    quarantines: _containers.RepeatedCompositeFieldContainer[QuarantineStatus]
    resumed: int
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutStatus]
    def __init__(self, base_model: _Optional[str] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., tenants: _Optional[int] = ..., adapters: _Optional[int] = ..., slos: _Optional[_Iterable[_Union[SloStatus, _Mapping]]] = ..., slo_counts: _Optional[_Iterable[_Union[SloCounts, _Mapping]]] = ..., circuits: _Optional[_Iterable[_Union[CircuitStatus, _Mapping]]] = ..., quarantined_prompts: _Optional[int] = ..., sampling_defaults: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., quarantines: _Optional[_Iterable[_Union[QuarantineStatus, _Mapping]]] = ..., resumed: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[RolloutStatus, _Mapping]]] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("tenant_id", "name", "in_force", "rollout")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    in_force: int
    rollout: AdapterRollout
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., in_force: _Optional[int] = ..., rollout: _Optional[_Union[AdapterRollout, _Mapping]] = ...) -> None: ...

class QuarantineStatus(_message.Message):
    __slots__ = ("tenant_id", "router_id", "prompts", "longest_s")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_S_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    router_id: str
    prompts: int
    longest_s: float
    def __init__(self, tenant_id: _Optional[str] = ..., router_id: _Optional[str] = ..., prompts: _Optional[int] = ..., longest_s: _Optional[float] = ...) -> None: ...

class SloStatus(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "requests", "failed", "availability", "availability_target", "error_budget", "measured", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "ttft_p95_target_ms", "ttft_met", "tpot_p50_ms", "tpot_p95_ms")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_TARGET_FIELD_NUMBER: _ClassVar[int]
    ERROR_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    requests: int
    failed: int
    availability: float
    availability_target: float
    error_budget: float
    measured: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    ttft_p95_target_ms: int
    ttft_met: bool
    tpot_p50_ms: float
    tpot_p95_ms: float
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., requests: _Optional[int] = ..., failed: _Optional[int] = ..., availability: _Optional[float] = ..., availability_target: _Optional[float] = ..., error_budget: _Optional[float] = ..., measured: _Optional[int] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p95_ms: _Optional[float] = ..., ttft_p99_ms: _Optional[float] = ..., ttft_p95_target_ms: _Optional[int] = ..., ttft_met: _Optional[bool] = ..., tpot_p50_ms: _Optional[float] = ..., tpot_p95_ms: _Optional[float] = ...) -> None: ...

class SloCounts(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "good", "bad", "in_time", "late", "ttft", "tpot")
    class TtftEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class TpotEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    good: int
    bad: int
    in_time: int
    late: int
    ttft: _containers.ScalarMap[int, int]
    tpot: _containers.ScalarMap[int, int]
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., good: _Optional[int] = ..., bad: _Optional[int] = ..., in_time: _Optional[int] = ..., late: _Optional[int] = ..., ttft: _Optional[_Mapping[int, int]] = ..., tpot: _Optional[_Mapping[int, int]] = ...) -> None: ...

class CircuitStatus(_message.Message):
    __slots__ = ("tenant_id", "whole_tenant", "adapter_version", "router_id", "half_open", "retry_after_s", "openings")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HALF_OPEN_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    whole_tenant: bool
    adapter_version: str
    router_id: str
    half_open: bool
    retry_after_s: float
    openings: int
    def __init__(self, tenant_id: _Optional[str] = ..., whole_tenant: _Optional[bool] = ..., adapter_version: _Optional[str] = ..., router_id: _Optional[str] = ..., half_open: _Optional[bool] = ..., retry_after_s: _Optional[float] = ..., openings: _Optional[int] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("reachable", "address", "epoch", "flows", "quotas", "overload", "neighbours", "adapters", "setbacks", "kv", "etcd", "merge_advice", "pools")
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SETBACKS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ETCD_FIELD_NUMBER: _ClassVar[int]
    MERGE_ADVICE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    reachable: bool
    address: str
    epoch: int
    flows: _containers.RepeatedCompositeFieldContainer[FlowStatus]
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaStatus]
    overload: OverloadStatus
    neighbours: _containers.RepeatedCompositeFieldContainer[NoisyNeighbour]
    adapters: _containers.RepeatedCompositeFieldContainer[_status_pb2.TenantAdapters]
    setbacks: _containers.RepeatedCompositeFieldContainer[_status_pb2.TenantSetbacks]
    kv: _containers.RepeatedCompositeFieldContainer[TenantKv]
    etcd: EtcdSpace
    merge_advice: _containers.RepeatedCompositeFieldContainer[MergeAdvice]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, reachable: _Optional[bool] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., flows: _Optional[_Iterable[_Union[FlowStatus, _Mapping]]] = ..., quotas: _Optional[_Iterable[_Union[QuotaStatus, _Mapping]]] = ..., overload: _Optional[_Union[OverloadStatus, _Mapping]] = ..., neighbours: _Optional[_Iterable[_Union[NoisyNeighbour, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[_status_pb2.TenantAdapters, _Mapping]]] = ..., setbacks: _Optional[_Iterable[_Union[_status_pb2.TenantSetbacks, _Mapping]]] = ..., kv: _Optional[_Iterable[_Union[TenantKv, _Mapping]]] = ..., etcd: _Optional[_Union[EtcdSpace, _Mapping]] = ..., merge_advice: _Optional[_Iterable[_Union[MergeAdvice, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class MergeAdvice(_message.Message):
    __slots__ = ("pool", "tenant_id", "adapter", "adapter_version", "requests_part", "workers", "pool_workers")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PART_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    POOL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    tenant_id: str
    adapter: str
    adapter_version: str
    requests_part: float
    workers: int
    pool_workers: int
    def __init__(self, pool: _Optional[str] = ..., tenant_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[str] = ..., requests_part: _Optional[float] = ..., workers: _Optional[int] = ..., pool_workers: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "base_model", "workers", "queued", "running", "overload")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    pool: str
    base_model: str
    workers: int
    queued: int
    running: int
    overload: OverloadStatus
    def __init__(self, pool: _Optional[str] = ..., base_model: _Optional[str] = ..., workers: _Optional[int] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., overload: _Optional[_Union[OverloadStatus, _Mapping]] = ...) -> None: ...

class EtcdSpace(_message.Message):
    __slots__ = ("used_bytes", "quota_bytes", "full")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    quota_bytes: int
    full: bool
    def __init__(self, used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., full: _Optional[bool] = ...) -> None: ...

class TenantKv(_message.Message):
    __slots__ = ("tenant_id", "device_bytes", "most_bytes")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    device_bytes: int
    most_bytes: int
    def __init__(self, tenant_id: _Optional[str] = ..., device_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class FlowStatus(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "queued", "running", "oldest_wait_s", "served_cost", "weight", "debt_cost", "pool")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_COST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DEBT_COST_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    queued: int
    running: int
    oldest_wait_s: float
    served_cost: int
    weight: int
    debt_cost: int
    pool: str
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., oldest_wait_s: _Optional[float] = ..., served_cost: _Optional[int] = ..., weight: _Optional[int] = ..., debt_cost: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class OverloadStatus(_message.Message):
    __slots__ = ("level", "rung", "classes", "tenants")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    level: int
    rung: str
    classes: _containers.RepeatedCompositeFieldContainer[ClassOverload]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantOverloadStatus]
    def __init__(self, level: _Optional[int] = ..., rung: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[ClassOverload, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantOverloadStatus, _Mapping]]] = ...) -> None: ...

class ClassOverload(_message.Message):
    __slots__ = ("qos_class", "late_part", "target_ms", "refused_by_routers", "refused", "shed", "capped")
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    LATE_PART_FIELD_NUMBER: _ClassVar[int]
    TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BY_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    qos_class: _common_pb2.QosClass
    late_part: float
    target_ms: float
    refused_by_routers: int
    refused: int
    shed: int
    capped: int
    def __init__(self, qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., late_part: _Optional[float] = ..., target_ms: _Optional[float] = ..., refused_by_routers: _Optional[int] = ..., refused: _Optional[int] = ..., shed: _Optional[int] = ..., capped: _Optional[int] = ...) -> None: ...

class TenantOverloadStatus(_message.Message):
    __slots__ = ("tenant_id", "level", "rung", "demand_shares")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    DEMAND_SHARES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    level: int
    rung: str
    demand_shares: float
    def __init__(self, tenant_id: _Optional[str] = ..., level: _Optional[int] = ..., rung: _Optional[str] = ..., demand_shares: _Optional[float] = ...) -> None: ...

class NoisyNeighbour(_message.Message):
    __slots__ = ("kind", "tenant_id", "worker_id", "evidence")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    tenant_id: str
    worker_id: str
    evidence: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[str] = ..., tenant_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., evidence: _Optional[_Mapping[str, float]] = ...) -> None: ...

class QuotaStatus(_message.Message):
    __slots__ = ("tenant_id", "qos_class", "requests", "leased_tokens", "settled_tokens", "level_tokens")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    qos_class: _common_pb2.QosClass
    requests: int
    leased_tokens: int
    settled_tokens: int
    level_tokens: int
    def __init__(self, tenant_id: _Optional[str] = ..., qos_class: _Optional[_Union[_common_pb2.QosClass, str]] = ..., requests: _Optional[int] = ..., leased_tokens: _Optional[int] = ..., settled_tokens: _Optional[int] = ..., level_tokens: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "address", "device", "connected", "draining", "sequence_slots", "running", "kv_blocks_total", "kv_blocks_free", "adapters_on_device", "adapters_on_host", "counters", "kept_out", "kv_block_bytes", "device_adapter_bytes", "tenants", "pool", "dedicated_tenant", "dedicated_adapter", "dedicated_version", "is_changing", "merge_problem")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_ON_HOST_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_OUT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEDICATED_TENANT_FIELD_NUMBER: _ClassVar[int]
    DEDICATED_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DEDICATED_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_CHANGING_FIELD_NUMBER: _ClassVar[int]
    MERGE_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    device: str
    connected: bool
    draining: bool
    sequence_slots: int
    running: int
    kv_blocks_total: int
    kv_blocks_free: int
    adapters_on_device: int
    adapters_on_host: int
    counters: _status_pb2.WorkerCounters
    kept_out: str
    kv_block_bytes: int
    device_adapter_bytes: int
    tenants: _containers.RepeatedCompositeFieldContainer[WorkerTenant]
    pool: str
    dedicated_tenant: str
    dedicated_adapter: str
    dedicated_version: str
    is_changing: bool
    merge_problem: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., connected: _Optional[bool] = ..., draining: _Optional[bool] = ..., sequence_slots: _Optional[int] = ..., running: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., adapters_on_device: _Optional[int] = ..., adapters_on_host: _Optional[int] = ..., counters: _Optional[_Union[_status_pb2.WorkerCounters, _Mapping]] = ..., kept_out: _Optional[str] = ..., kv_block_bytes: _Optional[int] = ..., device_adapter_bytes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[WorkerTenant, _Mapping]]] = ..., pool: _Optional[str] = ..., dedicated_tenant: _Optional[str] = ..., dedicated_adapter: _Optional[str] = ..., dedicated_version: _Optional[str] = ..., is_changing: _Optional[bool] = ..., merge_problem: _Optional[str] = ...) -> None: ...

class WorkerTenant(_message.Message):
    __slots__ = ("tenant_id", "kv_bytes", "adapter_bytes")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    kv_bytes: int
    adapter_bytes: int
    def __init__(self, tenant_id: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., adapter_bytes: _Optional[int] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "address", "answered", "caps_without_effect")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    CAPS_WITHOUT_EFFECT_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    answered: bool
    caps_without_effect: int
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ..., answered: _Optional[bool] = ..., caps_without_effect: _Optional[int] = ...) -> None: ...
