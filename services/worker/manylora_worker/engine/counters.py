"""How much the engine has done, for whom, since its start. EngineCore writes it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from manylora_shared.ids import QosClass, TenantId

from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.engine.request_table import RequestTable
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.swapping import Swapper
from manylora_worker.planning.step_planner import StepPlan, StepPlanner

_MAX_STEP_TIMES = 256


class FlowTokens(NamedTuple):
    prompt_tokens: int = 0  # computed in prefill, each further choice's one too; not again after an eviction
    output_tokens: int = 0  # drawn, stop tokens included


class StepSeconds(NamedTuple):
    qos_class: QosClass  # the highest of those that ran or waited
    seconds: float


class Setbacks(NamedTuple):
    preemptions: int = 0  # they gave up their slot to others at a unit's end
    swaps_out: int = 0  # their KV went to host memory
    evictions: int = 0  # they lost their blocks and are computed again
    recomputed_tokens: int = 0  # for whatever reason

    def with_more(self, more: Setbacks) -> Setbacks:
        return Setbacks(*map(operator.add, self, more))


class EngineStats(NamedTuple):
    requests: int
    sequences: int  # unfinished, waiting ones included
    running_sequences: int
    blocks_total: int
    blocks_free: int
    block_size: int
    generated_tokens: int
    steps: int
    failed_steps: int
    preemptions: int  # see Setbacks, as of the two below
    evictions: int
    recomputed_tokens: int
    swaps_out: int  # sequences whose KV went to host memory
    swaps_in: int  # and came back
    blocks_out: int  # copied to host memory
    blocks_in: int  # copied back; what was in the prefix cache is not
    host_blocks_total: int
    host_blocks_free: int
    adapter_version: int  # grows with each change of `EngineCore.adapter_tiers`
    tenant_adapters_version: int  # of `EngineCore.tenant_adapters`
    slots_version: int  # of `EngineCore.flow_slots`
    prefetches_ended: int = 0  # loaded or given up, since the engine's start
    adapters_found_device: int = 0  # see Found, as of all that follow
    adapters_found_host: int = 0
    adapters_found_disk: int = 0
    adapters_found_store: int = 0
    cold_starts_host: int = 0
    cold_starts_disk: int = 0
    cold_starts_store: int = 0
    cold_host_s: float = 0.0
    cold_disk_s: float = 0.0
    cold_store_s: float = 0.0
    guessed_tokens: int = 0  # see speculation.py
    right_guesses: int = 0


class WorkCounters:
    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.generated_tokens = 0
        self.guessed_tokens = 0
        self.right_guesses = 0
        self._flows: dict[FlowKey, list[int]] = {}  # [prompt tokens, output tokens], both cumulative
        self._changed_flows: dict[FlowKey, None] = {}
        self._step_times: deque[StepSeconds] = deque(maxlen=_MAX_STEP_TIMES)
        self.setbacks = Setbacks()  # of all tenants together
        self._tenants: dict[TenantId, Setbacks] = {}
        self._changed_setbacks: dict[TenantId, Setbacks] = {}

    def computed(self, flow: FlowKey, prompt_tokens: int, output_tokens: int) -> None:
        tokens = self._flows.setdefault(flow, [0, 0])
        tokens[0] += prompt_tokens
        tokens[1] += output_tokens
        self._changed_flows[flow] = None
        self.generated_tokens += output_tokens

    def guessed(self, num_guesses: int, num_right: int) -> None:
        self.guessed_tokens += num_guesses
        self.right_guesses += num_right

    def stepped(self, qos_class: QosClass, seconds: float) -> None:
        self._step_times.append(StepSeconds(qos_class, seconds))

    def take_step_times(self) -> SequenceOf[StepSeconds]:
        """Of the steps since the last call that did not fail; the newest, where nobody asked for long."""
        found = tuple(self._step_times)
        self._step_times.clear()
        return found

    def set_back(self, tenant_id: TenantId, more: Setbacks) -> None:
        self._tenants[tenant_id] = self._changed_setbacks[tenant_id] = self._tenants.get(
            tenant_id, Setbacks()
        ).with_more(more)
        self.setbacks = self.setbacks.with_more(more)

    def planned(self, plan: StepPlan) -> None:
        for sequence in plan.yielded:
            self.set_back(sequence.tenant_id, Setbacks(preemptions=1))
        for sequence in plan.swapped:
            self.set_back(sequence.tenant_id, Setbacks(swaps_out=1))
        for sequence in plan.evicted:
            self.set_back(sequence.tenant_id, Setbacks(evictions=1))

    def flows(self) -> Mapping[FlowKey, FlowTokens]:
        return {flow: FlowTokens(*tokens) for flow, tokens in self._flows.items()}

    def take_changed_flows(self) -> dict[FlowKey, FlowTokens]:
        changed = {flow: FlowTokens(*self._flows[flow]) for flow in self._changed_flows}
        self._changed_flows.clear()
        return changed

    def take_changed_setbacks(self) -> Mapping[TenantId, Setbacks]:
        changed, self._changed_setbacks = self._changed_setbacks, {}
        return changed


def stats_of(
    counters: WorkCounters,
    requests: RequestTable,
    planner: StepPlanner,
    pool: BlockPool,
    swapper: Swapper,
    adapters: AdapterCache,
) -> EngineStats:
    setbacks, swaps = counters.setbacks, swapper.counts
    return EngineStats(
        requests=len(requests),
        sequences=requests.num_unfinished,
        running_sequences=planner.num_running,
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        block_size=pool.block_size,
        generated_tokens=counters.generated_tokens,
        steps=counters.steps,
        failed_steps=counters.failed_steps,
        preemptions=setbacks.preemptions,
        evictions=setbacks.evictions,
        recomputed_tokens=setbacks.recomputed_tokens,
        swaps_out=swaps.swaps_out,
        swaps_in=swaps.swaps_in,
        blocks_out=swaps.blocks_out,
        blocks_in=swaps.blocks_in,
        host_blocks_total=swapper.host.num_blocks,
        host_blocks_free=swapper.host.num_free,
        adapter_version=adapters.version,
        tenant_adapters_version=adapters.tenants_version,
        slots_version=planner.slots_version + requests.loading_version,
        prefetches_ended=adapters.prefetches_ended,
        **adapters.found._asdict(),
        guessed_tokens=counters.guessed_tokens,
        right_guesses=counters.right_guesses,
    )
