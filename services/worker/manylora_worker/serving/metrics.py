"""Tells what the engine does: reads EngineView and ended requests on the event loop, writes Telemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manylora_shared.composition import uids_of
from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.registry import OTHER, Metric
from manylora_shared.tenancy.top_names import TopNames

from manylora_worker.adapters.tier_counts import FARTHER
from manylora_worker.engine.counters import Setbacks
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.hosting.view import EngineView
from manylora_worker.kinds.api import AdapterTier, EngineRequest, TokenOutput

LOOK_AT_METRICS_S = 1.0
MAX_TENANTS = 32  # by use; the rest is `other`
MAX_ADAPTERS = 100
_MAX_KNOWN_NAMES = 10_000
_BY_TENANT = (
    Metrics.KV_IN_USE,
    Metrics.KV_TENANT_EVICTIONS,
    Metrics.TENANT_PREEMPTIONS,
    Metrics.ADAPTER_REQUESTS,
)
_TIERS = {AdapterTier.HOST: "host", AdapterTier.DEVICE: "device"}
_DISK, _STORE = "disk", "store"


class EngineMetrics:
    def __init__(self, view: EngineView, telemetry: Telemetry, block_bytes: int) -> None:
        self._view = view
        self._telemetry = telemetry
        self._block_bytes = block_bytes
        self._told = view.stats

    def request_started(self, request: EngineRequest) -> None:
        """Nothing to tell."""

    def request_ended(self, request_id: RequestId) -> None:
        """Nothing to tell."""

    def engine_changed(self) -> None:
        now, before, self._told = self._view.stats, self._told, self._view.stats
        count, out, back = self._telemetry.count, {Attribute.DIRECTION: "out"}, {Attribute.DIRECTION: "in"}
        for name, amount, attributes in (
            (Metrics.FAILED_STEPS, now.failed_steps - before.failed_steps, None),
            (Metrics.PREEMPTIONS, now.preemptions - before.preemptions, None),
            (Metrics.KV_EVICTIONS, now.evictions - before.evictions, None),
            (Metrics.GUESSED_TOKENS, now.guessed_tokens - before.guessed_tokens, None),
            (Metrics.RIGHT_GUESSES, now.right_guesses - before.right_guesses, None),
            (Metrics.KV_SWAPS, now.swaps_out - before.swaps_out, out),
            (Metrics.KV_SWAPS, now.swaps_in - before.swaps_in, back),
            (Metrics.KV_SWAPPED_BYTES, (now.blocks_out - before.blocks_out) * self._block_bytes, out),
            (Metrics.KV_SWAPPED_BYTES, (now.blocks_in - before.blocks_in) * self._block_bytes, back),
        ):
            if amount:
                count(name, amount, attributes)
        for qos_class, seconds in self._view.step_times:
            self._telemetry.histogram(Metrics.STEP_SECONDS, seconds, {Attribute.QOS_CLASS: qos_class.value})
        if now.host_blocks_free != before.host_blocks_free:
            used = (now.host_blocks_total - now.host_blocks_free) * self._block_bytes
            self._telemetry.gauge(Metrics.KV_HOST_BYTES, used)


class WorkerMetrics:
    """Those by tenant and adapter, and those in vLLM's names. Owns whose names stand in them."""

    def __init__(
        self,
        view: EngineView,
        telemetry: Telemetry,
        *,
        model: str,
        block_bytes: int,
        sequence_slots: int,
        device_adapter_bytes: int,
        is_near: Callable[[AdapterUid], bool] = lambda uid: True,
    ) -> None:
        """is_near: on this machine's disk; elsewhere it is far, in the store."""
        self._view = view
        self._is_near = is_near
        self._telemetry = telemetry
        self._engine = {Attribute.ENGINE: "0", Attribute.MODEL: model}
        self._block_bytes = block_bytes
        self._sequence_slots = sequence_slots
        self._device_adapter_bytes = device_adapter_bytes
        self._tenants: TopNames[TenantId] = TopNames(MAX_TENANTS)
        self._adapters: TopNames[tuple[TenantId, str]] = TopNames(MAX_ADAPTERS)
        self._names: dict[AdapterUid, str] = {}  # as who asked last called it
        self._came_from: dict[RequestId, str] = {}  # the tier of its adapter then
        self._told_at: dict[RequestId, float] = {}  # its last tokens
        self._stats = view.stats
        self._setbacks: dict[TenantId, Setbacks] = {}
        self._tiers: Mapping[AdapterUid, AdapterTier] = {}
        self._holders: set[str] = set()
        self._lora: dict[str, str] | None = None

    # -- requests

    def comes(self, request: EngineRequest, adapter: str) -> None:
        uid, tenant = request.adapter_uid, request.tenant_id
        if not self._telemetry.has_metrics:
            return
        was_named = self._tenants.is_named(tenant)
        if self._tenants.used(tenant, 1 + len(request.prompt_token_ids)) and not was_named:
            for metric in (Metrics.TENANT_PREEMPTIONS, Metrics.KV_TENANT_EVICTIONS):
                self._telemetry.count(metric, 0, {Attribute.TENANT_ID: tenant})
        if uid is None:
            return
        parts = uids_of(uid)
        if len(parts) == 1:
            self._names.pop(parts[0], None)
            self._names[parts[0]] = adapter or uid
            if len(self._names) > _MAX_KNOWN_NAMES:
                del self._names[next(iter(self._names))]
        tiers = [self._tier_of(part) for part in parts]
        for tier in tiers:
            labels = {Attribute.TENANT_ID: self._shown(tenant), Attribute.TIER: tier}
            self._telemetry.count(Metrics.ADAPTER_REQUESTS, 1, labels)
        found = max(tiers, key=FARTHER.index)
        is_named = self._adapters.used((tenant, adapter), 1)
        if found == _TIERS[AdapterTier.DEVICE]:
            hit = (tenant, adapter) if is_named else (OTHER, OTHER)
            self._telemetry.count(Metrics.ADAPTER_HITS, 1, {Attribute.TENANT_ID: hit[0], Attribute.ADAPTER_ID: hit[1]})
        else:
            self._came_from[request.request_id] = found

    def _tier_of(self, uid: AdapterUid) -> str:
        tier = self._view.adapters.get(uid)
        return _TIERS[tier] if tier is not None else _DISK if self._is_near(uid) else _STORE

    def told(self, request: EngineRequest, outputs: Sequence[TokenOutput], now: float) -> None:
        """A frame with tokens."""
        if not self._telemetry.has_metrics:
            return
        tokens = sum(len(output.token_ids) for output in outputs)
        before, self._told_at[request.request_id] = self._told_at.get(request.request_id), now
        if before is not None and tokens:
            self._telemetry.histogram(Metrics.VLLM_ITL, (now - before) * request.n / tokens, self._engine)

    def left(self, request: EngineRequest) -> None:
        """However it ended."""
        self._told_at.pop(request.request_id, None)
        self._came_from.pop(request.request_id, None)

    def ended(self, request: EngineRequest, end: StreamEnd) -> None:
        if not self._telemetry.has_metrics or end.request_end is None:
            return
        found, telemetry, engine = end.request_end, self._telemetry, self._engine
        self._tenants.used(request.tenant_id, found.output_tokens)
        tier = self._came_from.get(request.request_id)
        if tier is not None and found.times.adapter_ready_s is not None:
            telemetry.histogram(Metrics.COLD_STARTS, found.adapter_wait_s, {Attribute.TIER: tier})
        for metric, amount in (
            (Metrics.VLLM_PROMPT_TOKENS, found.prompt_tokens),
            (Metrics.VLLM_CACHED_TOKENS, found.cached_prompt_tokens),
            (Metrics.VLLM_PREFIX_QUERIES, found.prompt_tokens),
            (Metrics.VLLM_PREFIX_HITS, found.cached_prompt_tokens),
        ):
            telemetry.count(metric, amount, engine)
        if end.kind is EndKind.COMPLETED:
            reason = {Attribute.FINISH_REASON: "length" if found.by_length else "stop"}
            telemetry.count(Metrics.VLLM_SUCCESS, 1, engine | reason)
        for metric, value in _figures(found):
            telemetry.histogram(metric, value, engine)

    # -- what is now

    def look(self, now: float, now_unix_s: float) -> None:
        for tenant in self._tenants.rank(now):
            self._telemetry.forget(_BY_TENANT, {Attribute.TENANT_ID: tenant})
        for tenant, adapter in self._adapters.rank(now):
            gone = {Attribute.TENANT_ID: tenant, Attribute.ADAPTER_ID: adapter}
            self._telemetry.forget([Metrics.ADAPTER_HITS], gone)
        self._tell_engine()
        self._tell_tenants()
        self._tell_adapters(now_unix_s)

    def _tell_engine(self) -> None:
        telemetry, engine = self._telemetry, self._engine
        now, before, self._stats = self._view.stats, self._stats, self._view.stats
        telemetry.gauge(Metrics.SLOTS_USED, now.running_sequences / self._sequence_slots)
        telemetry.gauge(Metrics.VLLM_RUNNING, now.running_sequences, engine)
        telemetry.gauge(Metrics.VLLM_WAITING, max(0, self._view.unfinished_sequences - now.running_sequences), engine)
        telemetry.gauge(Metrics.VLLM_KV_USAGE, 1 - now.blocks_free / now.blocks_total, engine)
        sizes = {Attribute.BLOCK_SIZE: str(now.block_size), Attribute.NUM_BLOCKS: str(now.blocks_total)}
        telemetry.gauge(Metrics.VLLM_CACHE_CONFIG, 1, engine | sizes)
        telemetry.count(Metrics.STEPS, now.steps - before.steps)
        telemetry.count(Metrics.VLLM_PREEMPTIONS, now.preemptions - before.preemptions, engine)
        telemetry.count(Metrics.VLLM_GENERATION_TOKENS, now.generated_tokens - before.generated_tokens, engine)

    def _tell_tenants(self) -> None:
        held: dict[str, int] = {}
        for tenant, blocks in self._view.kv_blocks.items():
            shown = self._shown(tenant)
            held[shown] = held.get(shown, 0) + blocks * self._block_bytes
        for shown in self._holders - held.keys():
            self._telemetry.forget([Metrics.KV_IN_USE], {Attribute.TENANT_ID: shown})
        self._holders = set(held)
        for shown, held_bytes in held.items():
            self._telemetry.gauge(Metrics.KV_IN_USE, held_bytes, {Attribute.TENANT_ID: shown})
        for tenant, setbacks in reversed(self._view.setbacks.items()):  # whose counts grew last stands last
            before = self._setbacks.get(tenant, Setbacks())
            if setbacks == before:
                break
            self._setbacks[tenant] = setbacks
            labels = {Attribute.TENANT_ID: self._shown(tenant)}
            self._telemetry.count(Metrics.TENANT_PREEMPTIONS, setbacks.preemptions - before.preemptions, labels)
            self._telemetry.count(Metrics.KV_TENANT_EVICTIONS, setbacks.evictions - before.evictions, labels)

    def _tell_adapters(self, now_unix_s: float) -> None:
        tiers = self._view.adapters
        if tiers is not self._tiers:
            for uid, tier in tiers.items():
                if (before := self._tiers.get(uid)) is None or before < tier:
                    self._telemetry.count(Metrics.ADAPTER_LOADS, 1, {Attribute.TIER: _TIERS[tier]})
            self._tiers = tiers
        on_device = {uid for uid, tier in tiers.items() if tier is AdapterTier.DEVICE}
        for name, count in (("device", len(on_device)), ("host", len(tiers) - len(on_device))):
            self._telemetry.gauge(Metrics.ADAPTERS_RESIDENT, count, {Attribute.TIER: name})
        wanted = {stream.request.adapter_uid for stream in self._view.running.values()}
        waiting = {uid for key in wanted if key is not None for uid in uids_of(key) if uid not in on_device}
        lora = {
            Attribute.MAX_LORA: str(self._max_adapters(len(on_device))),
            Attribute.RUNNING_ADAPTERS: self._listed(on_device),
            Attribute.WAITING_ADAPTERS: self._listed(waiting),
        }
        self._telemetry.gauge(Metrics.VLLM_LORA_INFO, now_unix_s, lora)
        if self._lora is not None and self._lora != lora:
            self._telemetry.forget([Metrics.VLLM_LORA_INFO], self._lora)
        self._lora = lora

    def _max_adapters(self, resident: int) -> int:
        """As many as there were room for, were all of the mean size."""
        used = sum(adapters.device_bytes for adapters in self._view.tenant_adapters.values())
        return max(resident, self._device_adapter_bytes * resident // used) if used else max(resident, 1)

    def _listed(self, uids: set[AdapterUid]) -> str:
        return ",".join(sorted(self._names.get(uid, uid) for uid in uids))

    def _shown(self, tenant: TenantId) -> str:
        return tenant if self._tenants.is_named(tenant) else OTHER


def _figures(end: RequestEnd) -> Sequence[tuple[Metric, float]]:
    times = end.times
    found: list[tuple[Metric, float]] = [
        (Metrics.VLLM_E2E, end.ended_s - times.added_s),
        (Metrics.VLLM_REQUEST_PROMPT, end.prompt_tokens),
        (Metrics.VLLM_REQUEST_GENERATION, end.output_tokens),
    ]
    if times.first_step_s is not None:
        found += [(Metrics.VLLM_QUEUE, times.first_step_s - times.added_s), (Metrics.VLLM_PREFILL, end.prefill_s)]
    if times.first_token_s is not None:
        found += [(Metrics.VLLM_TTFT, times.first_token_s - times.added_s), (Metrics.VLLM_DECODE, end.decode_s)]
        if end.output_tokens > 1:
            found.append((Metrics.VLLM_TPOT, end.decode_s / (end.output_tokens - 1)))
    return found
