"""The values behind the keys: frozen records with their JSON form, of whose fields reading checks every type.

Unknown fields are ignored, for services of neighbouring versions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from manylora_shared.address import parse_address
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue
from manylora_shared.ids import DEFAULT_POOL, name_problem
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line, LineEvent, Rollout

_MAX_COUNT = (1 << 31) - 1
_MAX_WIDE = (1 << 63) - 1
_WIDE = ("_bytes", "_parameters", "_operations")


@dataclass(frozen=True)
class _JsonRecord:
    @property
    def key(self) -> str:
        """Where it belongs in the store."""
        raise NotImplementedError

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def stored(cls, kv: KeyValue) -> Self:
        """Raises ValueError, also where the record names another key than the one that it stands under."""
        record = cls.from_json(kv.value)
        if record.key != kv.key:
            raise ValueError(f"{cls.__name__}: it is the record of {record.key}")
        return record

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises ValueError, naming the field."""
        try:
            loaded: Any = json.loads(data)
        except RecursionError as e:
            raise ValueError(f"{cls.__name__}: it is nested too deep") from e
        if not isinstance(loaded, dict):
            raise ValueError(f"{cls.__name__}: a JSON object is expected")
        return typing.cast("Self", _record(cls.__name__, cls, loaded))


def _record(name: str, kind: type, loaded: Mapping[str, Any]) -> object:
    types = _types(kind)
    values = {k: _read(f"{name}.{k}", types[k], v) for k, v in loaded.items() if k in types}
    try:
        return kind(**values)
    except TypeError as e:
        raise ValueError(f"{name}: {e}") from e


@functools.cache
def _types(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _read(name: str, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name}: must be a list")
        return tuple(_read(f"{name}[{i}]", typing.get_args(kind)[0], each) for i, each in enumerate(value))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: must be an object")
        return _record(name, typing.cast("type", kind), value)
    _check(name, kind, value)
    return value


def _check(name: str, kind: Any, value: Any) -> None:
    if typing.get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{name}: must be an object")
        for key, each in value.items():
            _check(f"{name}.{key}", typing.get_args(kind)[1], each)
    elif kind is str:
        if not isinstance(value, str) or not _is_text(value):
            raise ValueError(f"{name}: must be a text")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}: must be true or false")
    elif kind is int:
        most = _MAX_WIDE if name.endswith(_WIDE) else _MAX_COUNT
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name}: must be a whole number from 0 to {most}")
    elif type(value) not in (int, float) or not _is_finite(value):
        raise ValueError(f"{name}: must be a number")


def _is_text(value: str) -> bool:
    # JSON can write halves of characters, which no message can carry
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


@dataclass(frozen=True)
class WorkerRecord(_JsonRecord):
    worker_id: str
    address: str
    device: str
    model_name: str
    model_digest: str  # over what the base model computes: its configuration, its tokens, its weights
    vocab_size: int
    max_context_tokens: int
    sequence_slots: int
    max_lora_rank: int
    eos_token_ids: tuple[int, ...] = ()
    device_adapter_bytes: int = 0  # 0: a worker of an earlier version
    dtype: str = ""
    quantization: str = ""
    started_unix_s: float = 0.0  # by its own clock; stays when it registers again
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of the model, by their names in Sampling
    longest_context_tokens: int = 0  # of adapters that stretch the model's; 0: none is longer than that
    is_leaving: bool = False  # it takes no request any more
    pool: str = DEFAULT_POOL
    protocol: int = 1  # of an earlier version's worker
    layer_parameters: int = 0  # of the model, as in ledger.compute.ModelShape; 0: a worker of an earlier version
    head_parameters: int = 0
    attention_operations: int = 0
    rotation: str = ""  # of positions, where it is not the model folder's
    merge_problem: str = "a worker of an earlier version"  # why it merges no adapter into its weights; empty: it does

    def __post_init__(self) -> None:
        parse_address(self.address)
        if problem := name_problem(self.pool):
            raise ValueError(f"WorkerRecord.pool: {problem}")

    @property
    def key(self) -> str:
        return keys.worker(self.worker_id)

    @property
    def life(self) -> tuple[str, str, float]:
        """Where it differs, it is another process, or one of another pool."""
        return self.address, self.pool, self.started_unix_s

    @property
    def computes(self) -> tuple[str, str, str, str, int]:
        """What all workers of a pool have alike."""
        return self.model_digest, self.dtype, self.quantization, self.rotation, self.protocol

    @property
    def fingerprint(self) -> str:
        """Of what answers are computed with, but for adapters: equal ones answer alike. Hexadecimal."""
        return hashlib.sha256("\n".join(self.computes[:-1]).encode()).hexdigest()


@dataclass(frozen=True)
class HotAdapter:
    tenant_id: str
    uid: str


@dataclass(frozen=True)
class HotAdaptersRecord(_JsonRecord):
    adapters: tuple[HotAdapter, ...]  # the most used first

    @property
    def key(self) -> str:
        return keys.HOT_ADAPTERS


@dataclass(frozen=True)
class RouterRecord(_JsonRecord):
    router_id: str
    address: str
    started_unix_s: float = 0.0  # tells its lives apart

    def __post_init__(self) -> None:
        parse_address(self.address)

    @property
    def key(self) -> str:
        return keys.router(self.router_id)


@dataclass(frozen=True)
class SchedulerRecord(_JsonRecord):
    scheduler_id: str
    address: str

    def __post_init__(self) -> None:
        parse_address(self.address)

    @property
    def key(self) -> str:
        return keys.SCHEDULER_LEADER


@dataclass(frozen=True)
class SchedulerMember(SchedulerRecord):
    @property
    def key(self) -> str:
        return keys.scheduler(self.scheduler_id)


@dataclass(frozen=True)
class AnswerRecord(_JsonRecord):
    """It outlives its router, so that a key's work is not done again."""

    tenant_id: str
    digest: str  # of the idempotency key
    router_id: str  # empty: it was stopped, and whoever comes has the key
    router_started_unix_s: float = 0.0
    request_id: str = ""
    has_begun: bool = False  # a worker has begun the work
    charged_tokens: int = 0  # of the answer, with its prompt, by routers that were stopped

    @property
    def key(self) -> str:
        return keys.answer(self.tenant_id, self.digest)


@dataclass(frozen=True)
class AdapterRecord(_JsonRecord):
    """A name's line of versions, of which the first fields are the one in force: a record of one version has no others.
    A version's files stand in the adapter store under `objects/<uid>/`.
    """

    tenant_id: str
    name: str
    uid: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float
    number: int = 1
    state: str = ""
    report: str = ""
    rope: str = ""
    max_context_tokens: int = 0
    goes_alone: bool = False
    others: tuple[AdapterVersion, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    events: tuple[LineEvent, ...] = ()
    pool: str = DEFAULT_POOL
    base_digest: str = ""

    @property
    def key(self) -> str:
        return keys.adapter(self.tenant_id, self.name)

    @functools.cached_property
    def line(self) -> Line:
        first = AdapterVersion(
            self.number,
            self.uid,
            self.max_lora_rank,
            self.size_bytes,
            self.target_modules,
            self.created_unix_s,
            state=self.state,
            report=self.report,
            pool=self.pool,
            base_digest=self.base_digest,
            rope=self.rope,
            max_context_tokens=self.max_context_tokens,
            goes_alone=self.goes_alone,
        )
        return Line(first, self.others, self.rollouts, self.events)

    @classmethod
    def of(cls, tenant_id: str, name: str, line: Line) -> Self:
        record = cls(tenant_id, name, "", 0, 0, (), 0.0, others=line.others, rollouts=line.rollouts, events=line.events)
        return record.at(line.in_force)

    def at(self, version: AdapterVersion) -> Self:
        """With that version's facts in the first fields."""
        return dataclasses.replace(
            self,
            uid=version.uid,
            max_lora_rank=version.max_lora_rank,
            size_bytes=version.size_bytes,
            target_modules=version.target_modules,
            created_unix_s=version.created_unix_s,
            number=version.number,
            state=version.state,
            report=version.report,
            pool=version.pool,
            base_digest=version.base_digest,
            rope=version.rope,
            max_context_tokens=version.max_context_tokens,
            goes_alone=version.goes_alone,
        )


@dataclass(frozen=True)
class ClockIndexRecord(_JsonRecord):
    """Parts 0 to `parts` - 1 of a bank, together `size_bytes` long. The banks take turns: the last whole clock can be
    read until the next one is whole.
    """

    bank: int
    parts: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.bank not in (0, 1):
            raise ValueError(f"{type(self).__name__}.bank: must be 0 or 1")

    @property
    def key(self) -> str:
        return keys.SCHEDULER_CLOCK


@dataclass(frozen=True)
class KeyRecord(_JsonRecord):
    key_id: str
    secret_hash: str  # identity.hash_of(key_id, secret), hex
    tenant_id: str  # empty: bound to no tenant
    scopes: tuple[str, ...]
    name: str  # for people alone
    created_unix_s: float
    revoked_unix_s: float = 0.0  # 0: in force; a revoked key's record stays, so that nothing can bring the key back
    expires_unix_s: float = 0.0  # 0: never
    networks: tuple[str, ...] = ()  # CIDR, from where it may be used; none: from everywhere
    role: str = ""  # in the scopes' place
    requests_per_min: int = 0  # 0, as below: no limit of its own
    tokens_per_min: int = 0
    concurrency: int = 0

    @property
    def key(self) -> str:
        return keys.api_key(self.key_id)


@dataclass(frozen=True)
class DataKeyRecord(_JsonRecord):
    owner: str  # a tenant, or behind an @ what is no tenant's
    key_id: str  # as sealed files name it; hex
    wrapped_by: str  # the key-encryption key
    wrapped: str  # base64

    @property
    def key(self) -> str:
        return keys.data_key(self.owner)


@dataclass(frozen=True)
class AuditHeadRecord(_JsonRecord):
    """The end of a chain of the audit log, as its writer signed it last."""

    chain: str
    seq: int  # entries
    hash: str  # of the last one's line
    service: str  # that wrote it
    at_unix_s: float
    public_key: str  # Ed25519, hex
    signature: str  # over all of these, with an empty signature

    @property
    def key(self) -> str:
        return keys.audit_head(self.chain)
