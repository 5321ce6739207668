"""Slots and KV blocks under contention: who gets them, within which bounds, and that no text changes by it.

The engine's core over FakeRunner, in seeded random schedules. Each mutant breaks one rule; the same checks must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from manylora_shared.errors import QuotaExceeded
from manylora_shared.fair_queue import FairQueue
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine import step_planner
from manylora_worker.engine.api import EngineRequest, FinishReason, Sampling
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.fake_runner import FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.engine.sequence import Sequence
from manylora_worker.engine.slots import Slots
from manylora_worker.engine.step_planner import (
    OUTPUT_TOKEN_COST,
    QUANTUM_TOKENS,
    FlowSlots,
    PlannerLimits,
    StepPlanner,
)
from manylora_worker.engine.tenant_shares import TenantShare, TenantShares

_BLOCK = 4
_A, _B, _C = TenantId("a"), TenantId("b"), TenantId("c")
_CHUNK = 16


@dataclass
class Rig:
    """An engine whose requests are checked against the reference when they end."""

    core: EngineCore
    runner: FakeRunner
    requests: dict[RequestId, EngineRequest]
    tokens: dict[tuple[RequestId, int], list[int]]
    ended: dict[RequestId, int]
    """The step in which each ended."""
    steps: int = 0

    @staticmethod
    def make(
        num_blocks: int,
        slots: int,
        *,
        batch_tokens: int = 48,
        make_runner: type[FakeRunner] = FakeRunner,
        num_host_blocks: int = 0,
        copy_polls: int = 0,
    ) -> Rig:
        runner = make_runner(
            num_blocks=num_blocks, block_size=_BLOCK, num_host_blocks=num_host_blocks, copy_polls=copy_polls
        )
        limits = EngineLimits(PlannerLimits(batch_tokens, _CHUNK, slots), AdapterCacheLimits(8, 8), max_requests=512)
        core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits)
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
    ) -> RequestId:
        number = len(self.requests) + 1
        request = EngineRequest(
            request_id=RequestId(f"{tenant}{number}"),
            tenant_id=tenant,
            qos_class=qos_class,
            adapter_uid=None,
            prompt_token_ids=tuple((number * 31 + i * 7) % 259 for i in range(prompt)),
            max_tokens=max_tokens,
            sampling=Sampling(seed=number),
            n=n,
        )
        self.core.check(request)
        self.core.add(request, float(self.steps))
        self.requests[request.request_id] = request
        return request.request_id

    def step(self) -> None:
        self.steps += 1
        for output in self.core.step(float(self.steps)):
            known = self.tokens.setdefault((output.request_id, output.choice), [])
            assert output.first_position == len(known), "a token was lost or repeated"
            known += output.token_ids
        assert not self.runner.faults, self.runner.faults
        assert self.core.step_error is None, self.core.step_error
        self.core.check_invariants()
        for end in self.core.take_ended():
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


def _weights(weight: int) -> dict[QosClass, int]:
    return dict.fromkeys(QosClass, weight)


# ---- slots


def _contended(weight_a: int, weight_b: int, seed: int) -> None:
    """Two flows, each with more sequences than there are slots, for many quanta: their work is in their weights' ratio,
    at every step, up to the bound."""
    rng = random.Random(seed)
    slots = rng.randint(1, 6)
    rig = Rig.make(4000, slots)
    rig.core.set_share(_A, TenantShare(_weights(weight_a)))
    rig.core.set_share(_B, TenantShare(_weights(weight_b)))
    for _ in range(2 * slots):
        rig.add(_A, rng.randint(1, 40), 1500)
        rig.add(_B, rng.randint(1, 40), 1500)
    # R: what a flow can have reserved in all slots; c: its largest unit. See FairQueue; no boosts, no overruns.
    unit = max(QUANTUM_TOKENS * OUTPUT_TOKEN_COST, _CHUNK + OUTPUT_TOKEN_COST)
    bound = sum((slots * unit + unit) / weight for weight in (weight_a, weight_b))
    for _ in range(600):
        rig.step()
        spread = abs(rig.cost(_A) / weight_a - rig.cost(_B) / weight_b)
        assert spread <= bound, f"{spread} > {bound}"
    ratio = rig.drawn(_B) / max(1, rig.drawn(_A))
    assert 0.8 * weight_b / weight_a <= ratio <= 1.25 * weight_b / weight_a
    assert rig.core.stats().evictions == 0, "there is room for all: nothing is computed again"
    assert rig.core.stats().preemptions > 0


@pytest.mark.parametrize("seed", range(6))
def test_two_flows_of_weights_1_and_4_share_the_slots_1_to_4(seed: int) -> None:
    _contended(1, 4, seed)


def test_classes_are_flows_of_their_own_and_have_their_default_weights() -> None:
    rig = Rig.make(2000, 2)
    for _ in range(4):
        rig.add(_A, 4, 900, qos_class=QosClass.INTERACTIVE)
        rig.add(_A, 4, 900, qos_class=QosClass.BATCH)
    for _ in range(500):
        rig.step()
    ratio = rig.drawn(_A, QosClass.INTERACTIVE) / rig.drawn(_A, QosClass.BATCH)
    assert 3.4 <= ratio <= 4.6


def test_who_wakes_late_starts_within_a_quantum_and_gets_nothing_for_having_slept() -> None:
    rig = Rig.make(2000, 2)
    for _ in range(4):
        rig.add(_A, 4, 1500)
    for _ in range(300):
        rig.step()
    late = [rig.add(_B, 4, 600) for _ in range(4)]
    began, at = rig.steps, rig.drawn(_A)
    while not rig.drawn(_B):
        rig.step()
    assert rig.steps - began <= QUANTUM_TOKENS + 1
    while not any(request_id in rig.ended for request_id in late) and rig.steps < began + 400:
        rig.step()
    assert abs((rig.drawn(_A) - at) - rig.drawn(_B)) <= 3 * 2 * QUANTUM_TOKENS


def test_where_all_fit_nothing_is_preempted() -> None:
    rig = Rig.make(2000, 8)
    for i in range(8):
        rig.add((_A, _B, _C)[i % 3], 4 + i, 200)
    for _ in range(60):
        rig.step()
    assert (rig.core.stats().preemptions, rig.core.stats().evictions) == (0, 0)
    assert min(len(tokens) for tokens in rig.tokens.values()) >= 55, "a decode missed steps"


def test_a_slot_is_given_away_at_a_quantums_end_and_not_before() -> None:
    rig = Rig.make(200, 1)
    first = rig.add(_A, 4, 100)
    rig.step()
    rig.step()
    rig.add(_B, 4, 100)
    for _ in range(QUANTUM_TOKENS - 1):
        rig.step()
    assert len(rig.tokens[first, 0]) == 1 + QUANTUM_TOKENS
    assert rig.drawn(_B) == 0
    rig.step()
    assert rig.drawn(_B) == 1
    assert rig.core.blocks_held_by(_A) > 0, "parked, not thrown away"


def test_a_prefill_yields_after_each_chunk() -> None:
    rig = Rig.make(400, 1, batch_tokens=_CHUNK)
    rig.add(_A, 20 * _CHUNK, 4)
    rig.step()
    short = rig.add(_B, 4, 4)
    for _ in range(4):
        rig.step()
    assert rig.tokens[short, 0], "it waited for another's whole prompt"


@pytest.mark.parametrize(("slots", "most_steps"), [(4, 5), (QUANTUM_TOKENS, 2), (4 * QUANTUM_TOKENS, 2)])
def test_a_newcomer_waits_for_the_next_end_of_a_quantum_and_these_are_spread(slots: int, most_steps: int) -> None:
    """Steps from a newcomer's coming to its first token: until some quantum ends, and one for its prompt."""
    rig = Rig.make(8000, slots, batch_tokens=slots + 256)
    for _ in range(2 * slots):
        rig.add(_A, 4, 1500)
    for _ in range(100):
        rig.step()
    for i in range(40):
        newcomer = rig.add(_B, 4, 1)
        before = rig.steps
        while newcomer not in rig.ended:
            rig.step()
        assert rig.steps - before <= most_steps
        for _ in range(i % 5):
            rig.step()
    preemptions = rig.core.stats().preemptions
    for _ in range(10 * QUANTUM_TOKENS):
        rig.step()
    # Whole quanta again, once the ends are spread: each slot changes hands once a quantum.
    assert rig.core.stats().preemptions - preemptions <= 11 * slots


# ---- held back


def test_a_paused_request_leaves_its_slot_to_others_and_goes_on_where_it_stood() -> None:
    rig = Rig.make(400, 1)
    first = rig.add(_A, 6, 100)
    for _ in range(5):
        rig.step()
    rig.core.pause(first)
    rig.core.pause(first)
    waiting = rig.add(_B, 4, 40)
    for _ in range(QUANTUM_TOKENS):
        rig.step()
    at = len(rig.tokens[first, 0])
    assert at <= 4 + QUANTUM_TOKENS
    assert rig.core.flow_slots() == {(_B, QosClass.STANDARD): FlowSlots(1)}
    while waiting not in rig.ended:
        rig.step()
    assert len(rig.tokens[first, 0]) == at
    assert not rig.core.has_work()
    assert rig.core.begin_step(0.0) is None
    rig.core.resume(first)
    while first not in rig.ended:
        rig.step()


def test_nobody_waits_for_the_memory_of_a_request_that_is_not_read() -> None:
    """The paused one is of the heavier tenant, whose tag is the lesser: by the tags, nobody might take from it."""
    rig = Rig.make(30, 3)
    rig.core.set_share(_A, TenantShare(_weights(100)))
    paused = rig.add(_A, 60, 40)
    for _ in range(8):
        rig.step()
    rig.core.pause(paused)
    for _ in range(QUANTUM_TOKENS):
        rig.step()
    assert rig.core.blocks_held_by(_A) > 15
    first = rig.add(_B, 20, 40)
    for _ in range(4):
        rig.step()
    second = rig.add(_B, 32, 40)
    for _ in range(4):
        rig.step()
    assert rig.is_admitted(first)
    assert rig.is_admitted(second)
    assert rig.core.blocks_held_by(_A) == 0
    while not {first, second} <= set(rig.ended):
        rig.step()
    rig.core.resume(paused)
    while paused not in rig.ended:
        rig.step()


def test_who_was_paused_gets_nothing_for_it() -> None:
    rig = Rig.make(2000, 2)
    mine = [rig.add(_A, 4, 1500) for _ in range(3)]
    for _ in range(3):
        rig.add(_B, 4, 1500)
    for _ in range(40):
        rig.step()
    for request_id in mine:
        rig.core.pause(request_id)
    for _ in range(300):
        rig.step()
    for request_id in mine:
        rig.core.resume(request_id)
    at = rig.drawn(_A), rig.drawn(_B)
    for _ in range(300):
        rig.step()
    mine_since, others_since = rig.drawn(_A) - at[0], rig.drawn(_B) - at[1]
    assert abs(mine_since - others_since) <= 3 * 2 * QUANTUM_TOKENS


def test_who_is_kept_by_its_own_cap_gets_nothing_for_it() -> None:
    """a's hard cap holds one of its sequences, and it wants many; b takes what is left. When a's cap is lifted the two
    are equals from then on."""
    rig = Rig.make(4000, 4)
    rig.core.set_share(_A, TenantShare(_weights(1), hard_blocks=26))
    rig.core.set_share(_B, TenantShare(_weights(1)))
    for _ in range(8):
        rig.add(_A, 40, 60)
        rig.add(_B, 4, 3000)
    seen_capped = False
    for _ in range(160):
        rig.step()
        slots = rig.core.flow_slots().get((_A, QosClass.STANDARD))
        seen_capped |= slots is not None and slots.is_capped
        assert rig.core.blocks_held_by(_A) <= 26
    assert seen_capped
    assert rig.drawn(_B) > 1.7 * rig.drawn(_A), "the cap kept nobody back: the test shows nothing"
    rig.core.set_share(_A, TenantShare(_weights(1)))
    for _ in range(8):
        rig.add(_A, 4, 3000)
    rig.step()
    at = rig.cost(_A), rig.cost(_B)
    for _ in range(200):
        rig.step()
    bound = 2 * (4 + 1) * QUANTUM_TOKENS * OUTPUT_TOKEN_COST
    assert (rig.cost(_A) - at[0]) - (rig.cost(_B) - at[1]) <= bound


def test_a_flow_is_not_held_by_its_cap_any_longer_when_what_was_held_is_gone() -> None:
    """a's second request is past its cap while the first has a slot. It is aborted while the first is parked, and then
    the first takes a slot again."""
    rig = Rig.make(4000, 2)
    rig.core.set_share(_A, TenantShare(_weights(1), hard_blocks=26))
    rig.core.set_share(_B, TenantShare(_weights(8)))
    rig.add(_A, 64, 40)
    for _ in range(6):
        rig.step()
    held = rig.add(_A, 64, 40)
    rig.step()
    assert rig.core.flow_slots()[_A, QosClass.STANDARD].is_capped
    for _ in range(4):
        rig.add(_B, 4, 3000)
    while rig.core.flow_slots()[_A, QosClass.STANDARD].num_slots:
        rig.step()
    rig.core.abort(held, float(rig.steps))
    assert (_A, QosClass.STANDARD) not in rig.core.flow_slots(), "neither in a slot nor held back"
    while (_A, QosClass.STANDARD) not in rig.core.flow_slots():
        rig.step()
    assert not rig.core.flow_slots()[_A, QosClass.STANDARD].is_capped


# ---- blocks

_HARD, _SOFT, _RESERVE = 20, 12, 8
_NUM_BLOCKS = 36


def fight(
    seed: int,
    pauses: float = 0.0,
    *,
    make_runner: type[FakeRunner] = FakeRunner,
    num_host_blocks: int = 0,
    copy_polls: int = 0,
) -> Rig:
    """Three tenants want three times what there is. One is bounded, one has a reserve, one has nothing. In a step a
    request's reader stops with the probability `pauses`, and goes on some steps later."""
    rng = random.Random(seed)
    rig = Rig.make(
        _NUM_BLOCKS,
        rng.randint(3, 8),
        make_runner=make_runner,
        num_host_blocks=num_host_blocks,
        copy_polls=copy_polls,
    )
    rig.core.set_share(_A, TenantShare(_weights(1), soft_blocks=_SOFT, hard_blocks=_HARD))
    rig.core.set_share(_B, TenantShare(_weights(rng.choice([1, 3])), soft_blocks=_SOFT, reserve_blocks=_RESERVE))
    live: list[RequestId] = []
    paused: list[RequestId] = []
    asked: dict[RequestId, int] = {}
    """Requests of b that came while b's reserve had room for them, and when."""
    counts = dict.fromkeys((_A, _B, _C), 0)
    while rig.core.has_work() or paused or any(count < 14 for count in counts.values()):
        for tenant in (_A, _B, _C):
            waiting = sum(rig.requests[r].tenant_id == tenant for r in live)
            if counts[tenant] < 14 and waiting < 7 and rng.random() < 0.5:
                counts[tenant] += 1
                is_alone = tenant == _B and not waiting
                request_id = rig.add(
                    tenant, rng.randint(1, 24), rng.randint(1, 28), n=1 if is_alone else rng.choice([1, 1, 3])
                )
                live.append(request_id)
                prompt = len(rig.requests[request_id].prompt_token_ids)
                if is_alone and -(-prompt // _BLOCK) <= _RESERVE:
                    asked[request_id] = rig.steps
        if pauses and live and rng.random() < pauses:
            request_id = rng.choice(live)
            rig.core.pause(request_id)
            paused.append(request_id)
        while paused and (rng.random() < 0.1 or not rig.core.has_work()):
            rig.core.resume(paused.pop(rng.randrange(len(paused))))
        rig.step()
        assert rig.core.blocks_held_by(_A) <= _HARD, "the hard cap was passed"
        most = num_host_blocks // 2, num_host_blocks * _HARD // _NUM_BLOCKS
        on_host = rig.core.host_blocks_held()
        assert on_host.get(_A, 0) <= min(most), "the hard cap's part of the host was passed"
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


@pytest.mark.parametrize("seed", range(25))
def test_three_tenants_fight_for_a_third_of_what_they_need(seed: int) -> None:
    rig = fight(seed)
    assert rig.core.stats().evictions > 0, "the pool was not short: the test shows nothing"
    assert_all_is_counted_once(rig)


def assert_all_is_counted_once(rig: Rig) -> None:
    """Of a fight that is over: nothing is left, and what was lost by our choice was not charged."""
    stats = rig.core.stats()
    assert (stats.blocks_free, stats.host_blocks_free) == (stats.blocks_total, stats.host_blocks_total)
    for tenant in (_A, _B, _C):
        tokens = rig.core.flows()[tenant, QosClass.STANDARD]
        mine = [request for request in rig.requests.values() if request.tenant_id == tenant]
        # A further choice computes the prompt's last token once more.
        assert tokens.prompt_tokens == sum(len(r.prompt_token_ids) + r.n - 1 for r in mine), "recompute was charged"
        assert tokens.output_tokens == sum(r.max_tokens * r.n for r in mine)


@pytest.mark.parametrize("seed", range(25))
def test_and_with_readers_that_stop_and_go_on(seed: int) -> None:
    rig = fight(seed, pauses=0.2)
    assert rig.core.stats().blocks_free == rig.core.stats().blocks_total


def test_what_can_never_fit_its_tenants_cap_is_refused() -> None:
    rig = Rig.make(64, 4)
    rig.core.set_share(_A, TenantShare(hard_blocks=4, hard_mb=7))
    rig.add(_A, 8, 9)
    with pytest.raises(QuotaExceeded) as refusal:
        rig.add(_A, 8, 10)
    (breach,) = refusal.value.breaches
    assert (breach.quota, breach.tenant_id, breach.limit) == ("quotas.kv_hbm_mb_hard", "a", 7)
    assert "20 tokens, the tenant's hard cap is 16" in breach.description
    assert refusal.value.retry_after_s is None, "it never fits"
    rig.add(_B, 8, 10)


def test_what_others_have_reserved_is_nothing_to_count_on() -> None:
    rig = Rig.make(20, 4)
    rig.core.set_share(_B, TenantShare(reserve_blocks=10))
    rig.add(_A, 8, 33)
    with pytest.raises(QuotaExceeded):
        rig.add(_A, 8, 34)


def test_a_cap_that_falls_is_reached_within_a_quantum_and_a_longer_request_still_ends() -> None:
    rig = Rig.make(64, 6)
    requests = [rig.add(_A, 16, 40) for _ in range(6)]
    for _ in range(8):
        rig.step()
    assert rig.core.blocks_held_by(_A) > 20
    rig.core.set_share(_A, TenantShare(hard_blocks=15))
    for _ in range(QUANTUM_TOKENS + 1):
        rig.step()
    longest = -(-(16 + 40 - 1) // _BLOCK)
    while rig.core.has_work():
        assert rig.core.blocks_held_by(_A) <= max(longest, 15)
        rig.step()
    assert set(rig.ended) == set(requests)
    rig.core.set_share(_A, TenantShare(hard_blocks=5))
    with pytest.raises(QuotaExceeded):
        rig.add(_A, 16, 40)


def test_a_cap_below_a_running_request_lets_that_request_end() -> None:
    rig = Rig.make(64, 2)
    running = rig.add(_A, 16, 40)
    for _ in range(4):
        rig.step()
    rig.core.set_share(_A, TenantShare(hard_blocks=2))
    while rig.core.has_work():
        rig.step()
        assert rig.steps < 200
    assert running in rig.ended
    rig.add(_A, 2, 3)
    while rig.core.has_work():
        rig.step()
        assert rig.core.blocks_held_by(_A) <= 2


def test_memory_above_a_soft_share_goes_first_and_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """b, within its share, asks. a holds three times as much above its share as c: so it gives three times as much."""
    evicted: list[TenantId] = []
    evict = StepPlanner._evict

    def noted(self: StepPlanner, sequence: Sequence) -> None:
        evicted.append(sequence.tenant_id)
        evict(self, sequence)

    monkeypatch.setattr(StepPlanner, "_evict", noted)
    rig = Rig.make(42, 20, batch_tokens=256)
    rig.core.set_share(_A, TenantShare(soft_blocks=4))
    rig.core.set_share(_C, TenantShare(soft_blocks=4))
    rig.core.set_share(_B, TenantShare(soft_blocks=20))
    for tenant, count in ((_A, 14), (_C, 6)):
        for _ in range(count):
            rig.add(tenant, 5, 60)
    rig.step()
    assert (rig.core.blocks_held_by(_A), rig.core.blocks_held_by(_C)) == (28, 12)
    rig.add(_B, 64, 1)
    rig.step()
    assert rig.core.blocks_held_by(_B) == 16
    # 16 blocks in grains of 2: 6 of a's sequences and 2 of c's, and whoever grows takes more behind b.
    assert sorted(evicted[:8]) == [_A] * 6 + [_C] * 2


def test_reserves_together_take_half_of_the_pool_at_most() -> None:
    shares = TenantShares(100)
    shares.set(_A, TenantShare(reserve_blocks=90))
    assert shares.reserve(_A) == 50
    shares.set(_B, TenantShare(reserve_blocks=30))
    assert (shares.reserve(_A), shares.reserve(_B)) == (37, 12)
    shares.check(_C, 51, _BLOCK)
    with pytest.raises(QuotaExceeded):
        shares.check(_C, 52, _BLOCK)
    shares.set(_A, None)
    assert (shares.reserve(_A), shares.reserve(_B)) == (0, 30)


# ---- the checks can fail


def _no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant may break an invariant: what is to be seen is that the outputs and bounds show it."""
    monkeypatch.setattr(EngineCore, "check_invariants", lambda self: None)


def _drops_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = StepPlanner._evict

    def broken(self: StepPlanner, sequence: Sequence) -> None:
        if sequence.output_token_ids:
            sequence.output_token_ids.pop()
        evict(self, sequence)

    monkeypatch.setattr(StepPlanner, "_evict", broken)


def _cap_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = TenantShares.hard
    monkeypatch.setattr(TenantShares, "hard", lambda self, tenant_id: hard(self, tenant_id) + 1)


def _no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPlanner, "_claim_reserves", lambda self: None)
    monkeypatch.setattr(TenantShares, "reserve", lambda self, tenant_id: 0)


def _charges_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "num_new_tokens", lambda self, num_tokens: num_tokens)


def _keeps_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "forgo", lambda self, flow: None)


def _ends_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "spread", lambda self, step, most: most)


def _fights() -> None:
    for seed in range(25):
        test_three_tenants_fight_for_a_third_of_what_they_need(seed)


def _no_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who decodes keeps the slot to the end."""
    monkeypatch.setattr(step_planner, "QUANTUM_TOKENS", 10_000)


def _ignores_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantShares, "weight", lambda self, flow: 1)


def _newcomers() -> None:
    test_a_newcomer_waits_for_the_next_end_of_a_quantum_and_these_are_spread(QUANTUM_TOKENS, 2)


def _shares_slots() -> None:
    for seed in range(6):
        _contended(1, 4, seed)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (_drops_a_token, _fights),
        (_cap_off_by_one, _fights),
        (_no_claims, _fights),
        (_charges_recompute, _fights),
        (_no_quanta, _shares_slots),
        (_ignores_weights, _shares_slots),
        (_keeps_the_credit, test_who_is_kept_by_its_own_cap_gets_nothing_for_it),
        (_ends_together, _newcomers),
    ],
)
def test_a_mutant_fails(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None]
) -> None:
    _no_check(monkeypatch)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
