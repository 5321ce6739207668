"""An engine core over a fake runner whose texts are checked, and tenants that fight for its slots and blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.counters import Setbacks
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.step_planner import PlannerLimits

BLOCK = 4
A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
CHUNK = 16
HARD, SOFT, RESERVE = 20, 12, 8
NUM_BLOCKS = 36


@dataclass
class Rig:
    """An engine whose requests are checked against the reference when they end."""

    core: EngineCore
    runner: FakeRunner
    requests: dict[RequestId, EngineRequest]
    tokens: dict[tuple[RequestId, int], list[int]]
    ended: dict[RequestId, int]
    """The step in which each ended."""
    setbacks: dict[TenantId, Setbacks] = field(default_factory=dict)
    """As the core told of them last."""
    lost: dict[TenantId, tuple[int, int]] = field(default_factory=dict)
    """How often tenants' requests that ended were swapped out and evicted, by their own counts."""
    steps: int = 0
    block_s: dict[RequestId, int] = field(default_factory=dict)
    """What each has held, by its tables between steps."""
    is_timed: bool = True
    """Each step takes a second, and nothing else steps the core."""

    @staticmethod
    def make(
        num_blocks: int,
        slots: int,
        *,
        batch_tokens: int = 48,
        make_runner: type[FakeRunner] = FakeRunner,
        num_host_blocks: int = 0,
        copy_polls: int = 0,
        has_cache: bool = False,
    ) -> Rig:
        runner = make_runner(
            num_blocks=num_blocks, block_size=BLOCK, num_host_blocks=num_host_blocks, copy_polls=copy_polls
        )
        limits = EngineLimits(PlannerLimits(batch_tokens, CHUNK, slots), AdapterCacheLimits(8, 8), max_requests=512)
        prefix = PrefixOptions(PrefixKeys(bytes(32), "m"), 0.5) if has_cache else None
        core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits, prefix)
        runner.tenant_of = core.tenant_of
        return Rig(core, runner, {}, {}, {})

    def add(
        self,
        tenant: TenantId,
        prompt: int,
        max_tokens: int,
        *,
        n: int = 1,
        qos_class: QosClass = QosClass.STANDARD,
        stem: SequenceOf[int] = (),
    ) -> RequestId:
        """stem: what the prompt begins with, as far as it is long enough."""
        number = len(self.requests) + 1
        request = EngineRequest(
            request_id=RequestId(f"{tenant}{number}"),
            tenant_id=tenant,
            qos_class=qos_class,
            adapter_uid=None,
            prompt_token_ids=(*stem, *((number * 31 + i * 7) % 259 for i in range(prompt)))[:prompt],
            max_tokens=max_tokens,
            sampling=Sampling(seed=number),
            n=n,
        )
        self.core.check(request)
        self.core.add(request, float(self.steps))
        self.requests[request.request_id] = request
        return request.request_id

    def step(self) -> None:
        for group in self.core._requests.groups:  # what is held until the next step
            blocks = set().union(*(sequence.block_table for sequence in group.sequences))
            self.block_s[group.request.request_id] = self.block_s.get(group.request.request_id, 0) + len(blocks)
        self.steps += 1
        for output in self.core.step(float(self.steps)):
            known = self.tokens.setdefault((output.request_id, output.choice), [])
            assert output.first_position == len(known), "a token was lost or repeated"
            known += output.token_ids
        assert not self.runner.faults, self.runner.faults
        assert self.core.step_error is None, self.core.step_error
        self.core.check_invariants()
        grown = self.core.take_changed_setbacks()
        assert all(self.setbacks.get(tenant) != setbacks for tenant, setbacks in grown.items()), "told again"
        self.setbacks |= grown
        for end in self.core.take_ended():
            tenant = self.requests[end.request_id].tenant_id
            swaps, evictions = self.lost.get(tenant, (0, 0))
            self.lost[tenant] = swaps + end.num_swaps, evictions + end.num_evictions
            held = self.block_s.get(end.request_id, 0)
            assert not self.is_timed or end.kv_block_s == held, "it held other blocks than it is told"
            if end.reason is FinishReason.ABORTED:
                self.ended[end.request_id] = self.steps
                continue
            assert end.reason is FinishReason.STOP
            self.ended[end.request_id] = self.steps
            request = self.requests[end.request_id]
            for choice in range(request.n):
                want = reference_tokens(
                    request.prompt_token_ids, None, request.sampling.seed, choice, request.max_tokens
                )
                assert self.tokens[end.request_id, choice] == want, "the text was changed"

    def drawn(self, tenant: TenantId, qos_class: QosClass = QosClass.STANDARD) -> int:
        tokens = self.core.flows().get((tenant, qos_class))
        return 0 if tokens is None else tokens.output_tokens

    def cost(self, tenant: TenantId) -> int:
        tokens = self.core.flows().get((tenant, QosClass.STANDARD))
        return 0 if tokens is None else tokens.prompt_tokens + OUTPUT_TOKEN_COST * tokens.output_tokens

    def is_admitted(self, request_id: RequestId) -> bool:
        """Whether it holds blocks, or has ended."""
        if request_id in self.ended:
            return True
        group = self.core._requests[request_id]
        return any(sequence.block_table for sequence in group.sequences)


def weights(weight: int) -> dict[QosClass, int]:
    return dict.fromkeys(QosClass, weight)


def fight(
    seed: int,
    pauses: float = 0.0,
    *,
    make_runner: type[FakeRunner] = FakeRunner,
    num_host_blocks: int = 0,
    copy_polls: int = 0,
    group: str | None = None,
) -> Rig:
    """Three tenants want three times what there is. One is bounded, one has a reserve, one has nothing. In a step a
    request's reader stops with the probability `pauses`, and goes on some steps later. With a cache group all are in
    it, and their prompts begin alike."""
    rng = random.Random(seed)
    rig = Rig.make(
        NUM_BLOCKS,
        rng.randint(3, 8),
        make_runner=make_runner,
        num_host_blocks=num_host_blocks,
        copy_polls=copy_polls,
        has_cache=group is not None,
    )
    rig.runner.shares = lambda reader, writer: group is not None
    stem = range(16) if group is not None else ()
    rig.core.set_share(A, TenantShare(weights(1), soft_blocks=SOFT, hard_blocks=HARD, cache_group=group))
    bounds = TenantShare(weights(rng.choice([1, 3])), soft_blocks=SOFT, reserve_blocks=RESERVE, cache_group=group)
    rig.core.set_share(B, bounds)
    rig.core.set_share(C, TenantShare(cache_group=group))
    live: list[RequestId] = []
    paused: list[RequestId] = []
    asked: dict[RequestId, int] = {}
    """Requests of b that came while b's reserve had room for them, and when."""
    counts = dict.fromkeys((A, B, C), 0)
    while rig.core.has_work() or paused or any(count < 14 for count in counts.values()):
        for tenant in (A, B, C):
            waiting = sum(rig.requests[r].tenant_id == tenant for r in live)
            if counts[tenant] < 14 and waiting < 7 and rng.random() < 0.5:
                counts[tenant] += 1
                is_alone = tenant == B and not waiting
                prompt, output, n = rng.randint(1, 24), rng.randint(1, 28), 1 if is_alone else rng.choice([1, 1, 3])
                request_id = rig.add(tenant, prompt, output, n=n, stem=stem)
                live.append(request_id)
                if is_alone and -(-prompt // BLOCK) <= RESERVE:
                    asked[request_id] = rig.steps
        if pauses and live and rng.random() < pauses:
            request_id = rng.choice(live)
            rig.core.pause(request_id)
            paused.append(request_id)
        while paused and (rng.random() < 0.1 or not rig.core.has_work()):
            rig.core.resume(paused.pop(rng.randrange(len(paused))))
        rig.step()
        assert rig.core.blocks_held_by(A) <= HARD, "the hard cap was passed"
        most = num_host_blocks // 2, num_host_blocks * HARD // NUM_BLOCKS
        on_host = rig.core.host_blocks_held()
        assert on_host.get(A, 0) <= min(most), "the hard cap's part of the host was passed"
        assert max(on_host.values(), default=0) <= most[0], "one tenant has more than half of the host"
        live = [r for r in live if r not in rig.ended]
        for request_id, since in list(asked.items()):
            if rig.is_admitted(request_id) or request_id in paused:
                del asked[request_id]
            else:
                assert rig.steps - since <= QUANTUM_TOKENS + 1, "the reserve was not honoured within a quantum"
        assert rig.steps < 6000, "some request does not end"
    assert len(rig.ended) == 42, "somebody starved"
    return rig


def assert_all_is_counted_once(rig: Rig) -> None:
    """Of a fight that is over: nothing is left, and what was lost by our choice was not charged, but counted."""
    stats = rig.core.stats()
    told = rig.setbacks.values()
    for name in Setbacks._fields:
        assert sum(getattr(each, name) for each in told) == getattr(stats, name)
    for tenant, lost in rig.lost.items():
        mine = rig.setbacks.get(tenant, Setbacks())
        assert (mine.swaps_out, mine.evictions) == lost, "counted for another tenant"
    assert (stats.blocks_free, stats.host_blocks_free) == (stats.blocks_total, stats.host_blocks_total)
    for tenant in (A, B, C):
        tokens = rig.core.flows()[tenant, QosClass.STANDARD]
        mine = [request for request in rig.requests.values() if request.tenant_id == tenant]
        # A further choice computes the prompt's last token once more.
        assert tokens.prompt_tokens == sum(len(r.prompt_token_ids) + r.n - 1 for r in mine), "recompute was charged"
        assert tokens.output_tokens == sum(r.max_tokens * r.n for r in mine)
