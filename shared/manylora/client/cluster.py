"""What a cluster tells of itself, in the protos' names and units. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Models:
    base_model: str
    max_context_tokens: int
    adapters: tuple[str, ...]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # in force where a request sets nothing
    pools: tuple[PoolModel, ...] = ()  # that a request may name; the first is the one above


@dataclass(frozen=True)
class PoolModel:
    name: str  # by which a request asks for it
    pool: str
    base_model: str
    max_context_tokens: int


@dataclass(frozen=True)
class TenantInfo:
    tenant_id: str
    policy_yaml: str
    version: int
    adapters: int
    problem: str = ""  # why policy_yaml is not in force


@dataclass(frozen=True)
class PolicyChange:
    """As it stands and as a document would have it, both in canonical form."""

    tenant_id: str
    version: int  # of what stands; 0: there is no such tenant
    previous_policy_yaml: str
    policy_yaml: str

    @property
    def is_empty(self) -> bool:
        return self.previous_policy_yaml == self.policy_yaml


@dataclass(frozen=True)
class KeyInfo:
    key_id: str
    tenant_id: str
    scopes: tuple[str, ...]
    name: str
    created_unix_s: float
    revoked_unix_s: float  # 0: it was not
    expires_unix_s: float = 0.0  # 0: never
    networks: tuple[str, ...] = ()  # empty: from everywhere
    role: str = ""  # in the scopes' place
    requests_per_min: int = 0  # 0, as below: no limit of its own
    tokens_per_min: int = 0
    concurrency: int = 0


@dataclass(frozen=True)
class AdapterInfo:
    tenant_id: str
    name: str
    version: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float
    number: int = 1  # in its name's line
    retired_unix_s: float = 0.0  # 0: it can be asked for
    state: str = ""  # rejected or inconclusive: the quality gate's verdict, and nobody gets it
    report: str = ""  # its validation report's digest; empty: there is none
    pool: str = "default"  # for whose base model it is
    rope: str = ""  # its own rotation of positions, JSON; empty: the base model's
    max_context_tokens: int = 0  # 0: the base model's


@dataclass(frozen=True)
class CheckedAdapter:
    passed: bool
    report: Mapping[str, Any]  # docs/API.md


@dataclass(frozen=True)
class SamplesInfo:
    name: str
    size_bytes: int
    changed_unix_s: float
    count: int = 0  # as they are put; 0: not counted


@dataclass(frozen=True)
class AutoRollout:
    """A rollout that judges itself, step by step; empty or 0: the server's defaults."""

    steps: tuple[int, ...] = ()  # percent, growing; after the last comes the promotion
    min_requests: int = 0  # of each version in each step
    step_limit_s: float = 0.0  # a step that has not had as many by then is rolled back


@dataclass(frozen=True)
class RolloutFinding:
    """What speaks against the version. Shares are of the outcomes."""

    name: str
    canary_share: float
    canary_outcomes: int
    stable_share: float
    stable_outcomes: int
    evidence: float


@dataclass(frozen=True)
class RolloutProgress:
    canary_requests: int  # in this step
    stable_requests: int
    evidence: float  # at `limit` it is rolled back
    limit: float
    findings: tuple[RolloutFinding, ...]


@dataclass(frozen=True)
class AdapterRollout:
    to: int
    percent: int
    sticky: str
    auto: AutoRollout | None = None
    progress: RolloutProgress | None = None


@dataclass(frozen=True)
class AdapterEvent:
    at_unix_s: float
    change: str
    number: int
    before: int
    percent: int
    why: str = ""  # of a rollout that judges itself


@dataclass(frozen=True)
class AdapterLine:
    """A name's versions by number, the one in force, and what became of them."""

    versions: tuple[AdapterInfo, ...]
    in_force: int
    rollout: AdapterRollout | None
    events: tuple[AdapterEvent, ...]


@dataclass(frozen=True)
class GivenFeedback:
    adapter: str  # NAME@VERSION that had answered; empty: the base model
    counted: bool  # False: an earlier score stands, for this one came more than five seconds later


@dataclass(frozen=True)
class VerifiedAdapter:
    adapter: AdapterInfo
    problem: str  # with its files in the adapter store; empty: they are what was registered


@dataclass(frozen=True)
class FlowStatus:
    tenant_id: str
    qos_class: str
    queued: int
    running: int
    oldest_wait_s: float
    served_cost: int
    pool: str = "default"


@dataclass(frozen=True)
class QuotaStatus:
    """Since the scheduler's term began, in prompt and output tokens."""

    tenant_id: str
    qos_class: str
    requests: int
    leased_tokens: int
    settled_tokens: int
    level_tokens: int | None  # what the token bucket holds; None: there is none


@dataclass(frozen=True)
class ClassOverload:
    """Counts are since the scheduler's term began."""

    qos_class: str
    # of requests of tenants within their share that wait longer than the target; None: there were none
    late_part: float | None
    target_ms: float | None  # None: half of each request's own deadline
    refused_by_routers: int
    refused: int
    shed: int
    capped: int


@dataclass(frozen=True)
class TenantOverload:
    tenant_id: str
    level: int  # its own; the cluster's counts where it is higher
    rung: str
    demand_shares: float


@dataclass(frozen=True)
class OverloadStatus:
    """What is given up for want of capacity (docs/POLICY.md, Overload)."""

    level: int  # of the cluster: 0 (nothing) to 128
    rung: str
    classes: tuple[ClassOverload, ...]
    tenants: tuple[TenantOverload, ...]


@dataclass(frozen=True)
class NoisyNeighbour:
    """A tenant that others suffer from, or may soon."""

    kind: str
    tenant_id: str
    worker_id: str  # empty: on all
    evidence: Mapping[str, float]


@dataclass(frozen=True)
class PinStatus:
    name: str
    adapter_version: str  # empty: no adapter has this name
    workers: int
    on_device: int  # of these workers
    problem: str  # why a worker does not keep it on its device; empty: all do, or load it now


@dataclass(frozen=True)
class TenantAdapters:
    """Of the workers' adapter memory. Shared adapters count in full for each tenant."""

    tenant_id: str
    device_bytes: int
    host_bytes: int
    evictions: int  # of its adapters from devices, since the workers' starts
    displaced: int  # of these, for another tenant's adapter
    pins: tuple[PinStatus, ...]


@dataclass(frozen=True)
class TenantSetbacks:
    """Of a tenant's sequences, since the workers' starts. A sequence counts each time."""

    tenant_id: str
    preemptions: int  # they gave up their slot to others at a unit's end
    swaps_out: int  # their KV went to host memory
    evictions: int  # they lost their KV and are computed again
    recomputed_tokens: int  # for whatever reason


@dataclass(frozen=True)
class TenantKv:
    """On the devices of connected workers. Quotas bound it on each worker."""

    tenant_id: str
    device_bytes: int
    most_bytes: int  # on the worker where it has most


@dataclass(frozen=True)
class EtcdSpace:
    """All 0: not known yet, or not the caller's to see."""

    used_bytes: int
    quota_bytes: int  # at which etcd takes no more changes
    full: bool  # it takes none, until its alarm is disarmed


@dataclass(frozen=True)
class PoolStatus:
    """Workers that compute the same. An operator alone sees how many there are and what they do."""

    pool: str
    base_model: str  # empty: no worker of it was ever seen
    workers: int  # that take requests
    queued: int
    running: int
    overload: OverloadStatus


@dataclass(frozen=True)
class MergeAdvice:
    """An adapter whose requests of late fill workers of a pool by themselves, more than it has dedicated."""

    pool: str
    tenant_id: str
    adapter: str  # empty: it is not registered any more
    adapter_version: str
    requests_part: float  # of the pool's requests
    workers: int  # that it fills
    pool_workers: int


@dataclass(frozen=True)
class SchedulerStatus:
    reachable: bool
    address: str
    epoch: int
    flows: tuple[FlowStatus, ...]
    quotas: tuple[QuotaStatus, ...]
    overload: OverloadStatus
    neighbours: tuple[NoisyNeighbour, ...]
    kv: tuple[TenantKv, ...]
    adapters: tuple[TenantAdapters, ...]
    setbacks: tuple[TenantSetbacks, ...]  # an operator alone sees them
    etcd: EtcdSpace
    pools: tuple[PoolStatus, ...] = ()  # a key of a tenant sees those of its policy
    merge_advice: tuple[MergeAdvice, ...] = ()  # an operator alone sees it


@dataclass(frozen=True)
class WorkerStatus:
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
    generated_tokens: int
    adapters_found_device: int  # by requests, when they came; all cumulative
    adapters_found_host: int
    adapters_found_disk: int
    adapters_found_store: int  # that is far: a bucket
    cold_starts_host: int  # requests that waited until their adapters were on the device, by where the farthest was
    cold_starts_disk: int
    cold_starts_store: int
    cold_host_s: float
    cold_disk_s: float
    cold_store_s: float
    guessed_tokens: int  # by prompt lookup; cumulative, as of those that were right
    right_guesses: int
    kept_out: str  # why the pool does not take it; empty where it does
    pool: str = "default"
    dedicated_tenant: str = ""  # whose requests with one adapter it takes alone; empty: everybody's
    dedicated_adapter: str = ""
    dedicated_version: str = ""  # digest
    is_changing: bool = False  # whose requests it takes: it takes none meanwhile
    merge_problem: str = ""  # why an adapter was not merged when it was told so last


@dataclass(frozen=True)
class SloStatus:
    """Over all routers that answered: latencies of the last five minutes, availability of the last hour. None: not
    measured, or without a target.
    """

    tenant_id: str
    qos_class: str
    requests: int  # that count for availability: not those that the caller got wrong, cancelled or had no quota for
    failed: int
    availability: float
    availability_target: float | None
    error_budget: float | None  # left of the failures that the target permits: 1 all, 0 none, below 0 overspent
    measured: int  # requests with a first token
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    ttft_p95_target_ms: int | None
    ttft_met: bool | None
    tpot_p50_ms: float | None  # mean time per output token of a choice after its first
    tpot_p95_ms: float | None


@dataclass(frozen=True)
class CircuitStatus:
    """A router refuses requests that kept failing: an adapter's, or all of a tenant's."""

    tenant_id: str
    whole_tenant: bool
    adapter_version: str  # empty: the base model, or the whole tenant
    router_id: str
    half_open: bool  # a request is let through to try
    retry_after_s: float
    openings: int  # in a row


@dataclass(frozen=True)
class RouterStatus:
    router_id: str
    address: str
    answered: bool  # what it counted is in the sums
    caps_without_effect: int = 0  # tenants whose quotas.monthly_spend it cannot hold: no price list, or no ledger


@dataclass(frozen=True)
class QuarantineStatus:
    """A tenant's prompts that a router refuses because workers failed while they ran them."""

    tenant_id: str
    router_id: str
    prompts: int
    longest_s: float  # until the last of them is let through again


@dataclass(frozen=True)
class LiftedQuarantine:
    prompts: int  # each router counts its own
    missed_router_ids: tuple[str, ...]  # did not answer: there they stay


@dataclass(frozen=True)
class DroppedCaches:
    adapters: int  # that left device or host
    prefix_blocks: int


@dataclass(frozen=True)
class RolloutStatus:
    tenant_id: str
    name: str
    in_force: int
    rollout: AdapterRollout


@dataclass(frozen=True)
class ClusterStatus:
    base_model: str
    scheduler: SchedulerStatus
    workers: tuple[WorkerStatus, ...]
    routers: tuple[RouterStatus, ...]
    tenants: int
    adapters: int
    slos: tuple[SloStatus, ...]
    circuits: tuple[CircuitStatus, ...]
    quarantined_prompts: int
    quarantines: tuple[QuarantineStatus, ...]
    rollouts: tuple[RolloutStatus, ...] = ()
    resumed: int = 0  # how often another worker went on with an answer, since the routers' start
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # as in Models


@dataclass(frozen=True)
class Encryption:
    """How stores are sealed. wrapped_by: what wraps new data keys; data_keys: how many each key wraps."""

    is_on: bool
    wrapped_by: str = ""
    data_keys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RotatedEncryption:
    """forgotten: whether nothing opens any more that an earlier key wrapped."""

    wrapped_by: str
    rewrapped: int
    forgotten: bool


@dataclass(frozen=True)
class SealedItem:
    """problem: why it still lies in the clear; empty: it is sealed."""

    tenant_id: str
    what: str
    problem: str


@dataclass(frozen=True)
class KeptText:
    """A request that was kept, scrubbed. whole: the answer ended, and nothing was cut off."""

    request_id: str
    at_unix_s: float
    user: str
    adapter: str
    prompt: str
    answers: tuple[str, ...]
    whole: bool
