"""Slots and KV blocks under contention: who gets them, within which bounds, and that no text changes by it.

The engine's core over FakeRunner, in seeded random schedules. Each mutant breaks one rule; the same checks must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from manylora_shared.errors import QuotaExceeded
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.ids import QosClass, TenantId
from manylora_sim.fake_runner import AheadFakeRunner, FakeRunner
from manylora_worker.engine.core import EngineCore
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares
from manylora_worker.planning import step_planner
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.slots import Slots
from manylora_worker.planning.step_planner import (
    FlowSlots,
    StepPlanner,
)

from tests.properties.engine_rig import BLOCK, CHUNK, A, B, C, Rig, assert_all_is_counted_once, fight, weights

# ---- slots


def _contended(weight_a: int, weight_b: int, seed: int) -> None:
    """Two flows, each with more sequences than there are slots, for many quanta: their work is in their weights' ratio,
    at every step, up to the bound."""
    rng = random.Random(seed)
    slots = rng.randint(1, 6)
    rig = Rig.make(4000, slots)
    rig.core.set_share(A, TenantShare(weights(weight_a)))
    rig.core.set_share(B, TenantShare(weights(weight_b)))
    for _ in range(2 * slots):
        rig.add(A, rng.randint(1, 40), 1500)
        rig.add(B, rng.randint(1, 40), 1500)
    # R: what a flow can have reserved in all slots; c: its largest unit. See docs/decisions/0008; no overruns.
    unit = max(QUANTUM_TOKENS * OUTPUT_TOKEN_COST, CHUNK + OUTPUT_TOKEN_COST)
    bound = sum((slots * unit + unit) / weight for weight in (weight_a, weight_b))
    for _ in range(600):
        rig.step()
        spread = abs(rig.cost(A) / weight_a - rig.cost(B) / weight_b)
        assert spread <= bound, f"{spread} > {bound}"
    ratio = rig.drawn(B) / max(1, rig.drawn(A))
    assert 0.8 * weight_b / weight_a <= ratio <= 1.25 * weight_b / weight_a
    assert rig.core.stats().evictions == 0, "there is room for all: nothing is computed again"
    assert rig.core.stats().preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_two_flows_of_weights_1_and_4_share_the_slots_1_to_4(seed: int) -> None:
    _contended(1, 4, seed)


def test_classes_are_flows_of_their_own_and_have_their_default_weights() -> None:
    rig = Rig.make(2000, 2)
    for _ in range(4):
        rig.add(A, 4, 900, qos_class=QosClass.INTERACTIVE)
        rig.add(A, 4, 900, qos_class=QosClass.BATCH)
    for _ in range(500):
        rig.step()
    ratio = rig.drawn(A, QosClass.INTERACTIVE) / rig.drawn(A, QosClass.BATCH)
    assert 3.4 <= ratio <= 4.6


def test_who_wakes_late_starts_within_a_quantum_and_gets_nothing_for_having_slept() -> None:
    rig = Rig.make(2000, 2)
    for _ in range(4):
        rig.add(A, 4, 1500)
    for _ in range(300):
        rig.step()
    late = [rig.add(B, 4, 600) for _ in range(4)]
    began, at = rig.steps, rig.drawn(A)
    while not rig.drawn(B):
        rig.step()
    assert rig.steps - began <= QUANTUM_TOKENS + 1
    while not any(request_id in rig.ended for request_id in late) and rig.steps < began + 400:
        rig.step()
    assert abs((rig.drawn(A) - at) - rig.drawn(B)) <= 3 * 2 * QUANTUM_TOKENS


def test_where_all_fit_nothing_is_preempted() -> None:
    rig = Rig.make(2000, 8)
    for i in range(8):
        rig.add((A, B, C)[i % 3], 4 + i, 200)
    for _ in range(60):
        rig.step()
    assert (rig.core.stats().preemptions, rig.core.stats().evictions) == (0, 0)
    assert min(len(tokens) for tokens in rig.tokens.values()) >= 55, "a decode missed steps"


def test_a_slot_is_given_away_at_a_quantums_end_and_not_before() -> None:
    rig = Rig.make(200, 1)
    first = rig.add(A, 4, 100)
    rig.step()
    rig.step()
    rig.add(B, 4, 100)
    for _ in range(QUANTUM_TOKENS - 1):
        rig.step()
    assert len(rig.tokens[first, 0]) == 1 + QUANTUM_TOKENS
    assert rig.drawn(B) == 0
    rig.step()
    assert rig.drawn(B) == 1
    assert rig.core.blocks_held_by(A) > 0, "parked, not thrown away"


def test_a_prefill_yields_after_each_chunk() -> None:
    rig = Rig.make(400, 1, batch_tokens=CHUNK)
    rig.add(A, 20 * CHUNK, 4)
    rig.step()
    short = rig.add(B, 4, 4)
    for _ in range(4):
        rig.step()
    assert rig.tokens[short, 0], "it waited for another's whole prompt"


@pytest.mark.long
@pytest.mark.parametrize(("slots", "most_steps"), [(4, 5), (QUANTUM_TOKENS, 2), (4 * QUANTUM_TOKENS, 2)])
def test_a_newcomer_waits_for_the_next_end_of_a_quantum_and_these_are_spread(slots: int, most_steps: int) -> None:
    """Steps from a newcomer's coming to its first token where no quantum is cut for it: until one ends, and one for its
    prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPlanner, "_cut_quanta", lambda self: [])
        _wait_for_quanta(slots, most_steps)


def _wait_for_quanta(slots: int, most_steps: int) -> None:
    rig = Rig.make(8000, slots, batch_tokens=slots + 256)
    for _ in range(2 * slots):
        rig.add(A, 4, 1500)
    for _ in range(100):
        rig.step()
    for i in range(40):
        newcomer = rig.add(B, 4, 1)
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


@pytest.mark.parametrize("slots", [2, 4, QUANTUM_TOKENS, 4 * QUANTUM_TOKENS])
def test_who_has_less_than_its_share_of_the_slots_waits_for_no_quantum_of_who_has_more(slots: int) -> None:
    rig = Rig.make(8000, slots, batch_tokens=slots + 256)
    for _ in range(2 * slots):
        rig.add(A, 4, 1500)
    for i in range(100):
        rig.step()
        if i % 9 == 5:
            newcomers = [rig.add(B, 4, 1) for _ in range(min(4, slots // 2))]
            rig.step()
            assert all(newcomer in rig.ended for newcomer in newcomers)
            assert rig.core.flow_slots()[A, QosClass.STANDARD].num_slots == slots - len(newcomers)


def test_a_quantum_is_cut_for_no_more_than_a_share_and_for_no_equal() -> None:
    """Of four slots two are the newcomer's; the third of its requests waits for a quantum's end."""
    rig = Rig.make(8000, 4, batch_tokens=256)
    for _ in range(8):
        rig.add(A, 4, 1500)
    for _ in range(5):
        rig.step()
    for _ in range(3):
        rig.add(B, 4, 1500)
    rig.step()
    assert rig.core.flow_slots()[A, QosClass.STANDARD].num_slots == 2
    assert rig.core.flow_slots()[B, QosClass.STANDARD].num_slots == 2
    preemptions = rig.core.stats().preemptions
    for _ in range(10 * QUANTUM_TOKENS):
        rig.step()
    assert rig.core.stats().preemptions - preemptions <= 11 * 4, "equal flows go by whole quanta"


# ---- held back


def test_a_paused_request_leaves_its_slot_to_others_and_goes_on_where_it_stood() -> None:
    rig = Rig.make(400, 1)
    first = rig.add(A, 6, 100)
    for _ in range(5):
        rig.step()
    rig.core.pause(first)
    rig.core.pause(first)
    waiting = rig.add(B, 4, 40)
    for _ in range(QUANTUM_TOKENS):
        rig.step()
    at = len(rig.tokens[first, 0])
    assert at <= 4 + QUANTUM_TOKENS
    assert rig.core.flow_slots() == {(B, QosClass.STANDARD): FlowSlots(1)}
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
    rig.core.set_share(A, TenantShare(weights(100)))
    paused = rig.add(A, 60, 40)
    for _ in range(8):
        rig.step()
    rig.core.pause(paused)
    for _ in range(QUANTUM_TOKENS):
        rig.step()
    assert rig.core.blocks_held_by(A) > 15
    first = rig.add(B, 20, 40)
    for _ in range(4):
        rig.step()
    second = rig.add(B, 32, 40)
    for _ in range(4):
        rig.step()
    assert rig.is_admitted(first)
    assert rig.is_admitted(second)
    assert rig.core.blocks_held_by(A) == 0
    while not {first, second} <= set(rig.ended):
        rig.step()
    rig.core.resume(paused)
    while paused not in rig.ended:
        rig.step()


def test_who_was_paused_gets_nothing_for_it() -> None:
    rig = Rig.make(2000, 2)
    mine = [rig.add(A, 4, 1500) for _ in range(3)]
    for _ in range(3):
        rig.add(B, 4, 1500)
    for _ in range(40):
        rig.step()
    for request_id in mine:
        rig.core.pause(request_id)
    for _ in range(300):
        rig.step()
    for request_id in mine:
        rig.core.resume(request_id)
    at = rig.drawn(A), rig.drawn(B)
    for _ in range(300):
        rig.step()
    mine_since, others_since = rig.drawn(A) - at[0], rig.drawn(B) - at[1]
    assert abs(mine_since - others_since) <= 3 * 2 * QUANTUM_TOKENS


def test_who_is_kept_by_its_own_cap_gets_nothing_for_it() -> None:
    """a's hard cap holds one of its sequences, and it wants many; b takes what is left. When a's cap is lifted the two
    are equals from then on."""
    rig = Rig.make(4000, 4)
    rig.core.set_share(A, TenantShare(weights(1), hard_blocks=26))
    rig.core.set_share(B, TenantShare(weights(1)))
    for _ in range(8):
        rig.add(A, 40, 60)
        rig.add(B, 4, 3000)
    seen_capped = False
    for _ in range(160):
        rig.step()
        slots = rig.core.flow_slots().get((A, QosClass.STANDARD))
        seen_capped |= slots is not None and slots.is_capped
        assert rig.core.blocks_held_by(A) <= 26
    assert seen_capped
    assert rig.drawn(B) > 1.7 * rig.drawn(A), "the cap kept nobody back: the test shows nothing"
    rig.core.set_share(A, TenantShare(weights(1)))
    for _ in range(8):
        rig.add(A, 4, 3000)
    rig.step()
    at = rig.cost(A), rig.cost(B)
    for _ in range(200):
        rig.step()
    bound = 2 * (4 + 1) * QUANTUM_TOKENS * OUTPUT_TOKEN_COST
    assert (rig.cost(A) - at[0]) - (rig.cost(B) - at[1]) <= bound


def test_a_flow_is_not_held_by_its_cap_any_longer_when_what_was_held_is_gone() -> None:
    """a's second request is past its cap while the first has a slot. It is aborted while the first is parked, and then
    the first takes a slot again."""
    rig = Rig.make(4000, 2)
    rig.core.set_share(A, TenantShare(weights(1), hard_blocks=26))
    rig.core.set_share(B, TenantShare(weights(8)))
    rig.add(A, 64, 40)
    for _ in range(6):
        rig.step()
    held = rig.add(A, 64, 40)
    rig.step()
    assert rig.core.flow_slots()[A, QosClass.STANDARD].is_capped
    for _ in range(4):
        rig.add(B, 4, 3000)
    while rig.core.flow_slots()[A, QosClass.STANDARD].num_slots:
        rig.step()
    rig.core.abort(held, float(rig.steps))
    assert (A, QosClass.STANDARD) not in rig.core.flow_slots(), "neither in a slot nor held back"
    while (A, QosClass.STANDARD) not in rig.core.flow_slots():
        rig.step()
    assert not rig.core.flow_slots()[A, QosClass.STANDARD].is_capped


# ---- blocks

FIGHTS = [seed for seed in range(26) if seed != 14]
"""In 14 the pool is not short: its requests come one after the other."""


@pytest.mark.long
@pytest.mark.parametrize("seed", FIGHTS)
def test_three_tenants_fight_for_a_third_of_what_they_need(seed: int) -> None:
    rig = fight(seed)
    assert rig.core.stats().evictions > 0, "the pool was not short: the test shows nothing"
    assert_all_is_counted_once(rig)


@pytest.mark.parametrize("make_runner", [FakeRunner, AheadFakeRunner])
@pytest.mark.parametrize("seed", range(15))
def test_and_in_a_cache_group(seed: int, make_runner: type[FakeRunner]) -> None:
    """The bounds hold though tenants hold one another's blocks: each counts for all that it holds."""
    rig = fight(seed, make_runner=make_runner, num_host_blocks=30 * (seed % 2), copy_polls=2, group="g")
    assert rig.core.stats().blocks_free == rig.core.stats().blocks_total


def test_a_tenants_block_may_hold_what_came_back_from_the_host_and_another_of_its_group_had_computed() -> None:
    """In this fight such a block is freed, and its owner gets it again, to copy a block into it."""
    rig = fight(232, num_host_blocks=30, copy_polls=2, group="g")
    assert rig.core.stats().blocks_free == rig.core.stats().blocks_total


def test_what_a_group_has_computed_counts_before_it_is_found() -> None:
    """b holds nine blocks, of which a would find eight; of a's cap of twelve only six are left."""
    rig = Rig.make(100, 8, has_cache=True)
    rig.runner.shares = lambda reader, writer: True
    rig.core.set_share(A, TenantShare(hard_blocks=12, cache_group="g"))
    rig.core.set_share(B, TenantShare(cache_group="g"))
    stem = range(100, 132)
    rig.add(B, 33, 60, stem=stem)
    for _ in range(4):
        rig.step()
    first = rig.add(A, 17, 8)
    rig.step()
    second = rig.add(A, 33, 8, stem=stem)
    while rig.core.has_work():
        rig.step()
        assert rig.core.blocks_held_by(A) <= 12, "the hard cap was passed"
    assert rig.ended[first] < rig.ended[second]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25))
def test_and_with_readers_that_stop_and_go_on(seed: int) -> None:
    rig = fight(seed, pauses=0.2)
    assert rig.core.stats().blocks_free == rig.core.stats().blocks_total


def test_what_can_never_fit_its_tenants_cap_is_refused() -> None:
    rig = Rig.make(64, 4)
    rig.core.set_share(A, TenantShare(hard_blocks=4, hard_mb=7))
    rig.add(A, 8, 9)
    with pytest.raises(QuotaExceeded) as refusal:
        rig.add(A, 8, 10)
    (breach,) = refusal.value.breaches
    assert (breach.quota, breach.tenant_id, breach.limit) == ("quotas.kv_hbm_mb_hard", "a", 7)
    assert "20 tokens, the tenant's hard cap is 16" in breach.description
    assert refusal.value.retry_after_s is None, "it never fits"
    rig.add(B, 8, 10)


def test_what_others_have_reserved_is_nothing_to_count_on() -> None:
    rig = Rig.make(20, 4)
    rig.core.set_share(B, TenantShare(reserve_blocks=10))
    rig.add(A, 8, 33)
    with pytest.raises(QuotaExceeded):
        rig.add(A, 8, 34)


@pytest.mark.parametrize("slots", [2, 5])
def test_a_reserve_is_honoured_within_a_quantum_though_its_tenant_has_its_share_of_the_slots(slots: int) -> None:
    """All blocks are a hog's; the other has a slot, and no claim to a second one."""
    for wait in range(QUANTUM_TOKENS):
        rig = Rig.make(64, slots)
        rig.core.set_share(A, TenantShare(weights(8)))
        rig.core.set_share(B, TenantShare(weights(1), reserve_blocks=30))
        rig.add(B, 4, 100)
        for _ in range(12):
            rig.add(A, 16, 100)
        for _ in range(40 + wait):
            rig.step()
        held = rig.core.blocks_held_by(B)
        rig.add(B, 12, 4)
        for _ in range(QUANTUM_TOKENS + 1):
            rig.step()
        assert rig.core.blocks_held_by(B) > held + 1


def test_a_cap_that_falls_is_reached_within_a_quantum_and_a_longer_request_still_ends() -> None:
    rig = Rig.make(64, 6)
    requests = [rig.add(A, 16, 40) for _ in range(6)]
    for _ in range(8):
        rig.step()
    assert rig.core.blocks_held_by(A) > 20
    rig.core.set_share(A, TenantShare(hard_blocks=15))
    for _ in range(QUANTUM_TOKENS + 1):
        rig.step()
    longest = -(-(16 + 40 - 1) // BLOCK)
    while rig.core.has_work():
        assert rig.core.blocks_held_by(A) <= max(longest, 15)
        rig.step()
    assert set(rig.ended) == set(requests)
    rig.core.set_share(A, TenantShare(hard_blocks=5))
    with pytest.raises(QuotaExceeded):
        rig.add(A, 16, 40)


def test_a_cap_below_a_running_request_lets_that_request_end() -> None:
    rig = Rig.make(64, 2)
    running = rig.add(A, 16, 40)
    for _ in range(4):
        rig.step()
    rig.core.set_share(A, TenantShare(hard_blocks=2))
    while rig.core.has_work():
        rig.step()
        assert rig.steps < 200
    assert running in rig.ended
    rig.add(A, 2, 3)
    while rig.core.has_work():
        rig.step()
        assert rig.core.blocks_held_by(A) <= 2


def test_memory_above_a_soft_share_goes_first_and_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """b, within its share, asks. a holds three times as much above its share as c: so it gives three times as much."""
    evicted: list[TenantId] = []
    evict = Parking.evict

    def noted(self: Parking, sequence: Sequence) -> None:
        evicted.append(sequence.tenant_id)
        evict(self, sequence)

    monkeypatch.setattr(Parking, "evict", noted)
    rig = Rig.make(42, 20, batch_tokens=256)
    rig.core.set_share(A, TenantShare(soft_blocks=4))
    rig.core.set_share(C, TenantShare(soft_blocks=4))
    rig.core.set_share(B, TenantShare(soft_blocks=20))
    for tenant, count in ((A, 14), (C, 6)):
        for _ in range(count):
            rig.add(tenant, 5, 60)
    rig.step()
    assert (rig.core.blocks_held_by(A), rig.core.blocks_held_by(C)) == (28, 12)
    rig.add(B, 64, 1)
    rig.step()
    assert rig.core.blocks_held_by(B) == 16
    # 16 blocks in grains of 2: 6 of a's sequences and 2 of c's, and whoever grows takes more behind b.
    assert sorted(evicted[:8]) == [A] * 6 + [C] * 2


def test_reserves_together_take_half_of_the_pool_at_most() -> None:
    shares = TenantShares(100)
    shares.set(A, TenantShare(reserve_blocks=90))
    assert shares.reserve(A) == 50
    shares.set(B, TenantShare(reserve_blocks=30))
    assert (shares.reserve(A), shares.reserve(B)) == (37, 12)
    shares.check(C, 51, BLOCK)
    with pytest.raises(QuotaExceeded):
        shares.check(C, 52, BLOCK)
    shares.set(A, None)
    assert (shares.reserve(A), shares.reserve(B)) == (0, 30)


# ---- the checks can fail


def _no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant may break an invariant: what is to be seen is that the outputs and bounds show it."""
    monkeypatch.setattr(EngineCore, "check_invariants", lambda self: None)


def _drops_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = Parking.evict

    def broken(self: Parking, sequence: Sequence) -> None:
        if sequence.output_token_ids:
            sequence.output_token_ids.pop()
        evict(self, sequence)

    monkeypatch.setattr(Parking, "evict", broken)


def _cap_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = TenantShares.hard
    monkeypatch.setattr(TenantShares, "hard", lambda self, tenant_id: hard(self, tenant_id) + 1)


def _no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPlanner, "_claim_reserves", lambda self: None)
    monkeypatch.setattr(TenantShares, "reserve", lambda self, tenant_id: 0)


def _charges_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "num_new_tokens", lambda self, num_tokens: num_tokens)


def _keeps_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceQueue, "forgo", lambda self, flow: None)


def _ends_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "spread", lambda self, step, most: most)


def _joins_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others hold already is not counted before it is shared."""
    monkeypatch.setattr(BlockPool, "num_new_among", _only_idle)


def _only_idle(pool: BlockPool, tenant_id: TenantId, block_ids: list[int]) -> int:
    return pool.num_idle_among(block_ids)


def _fights() -> None:
    for seed in FIGHTS:
        test_three_tenants_fight_for_a_third_of_what_they_need(seed)


def _reserves() -> None:
    for slots in (2, 5):
        test_a_reserve_is_honoured_within_a_quantum_though_its_tenant_has_its_share_of_the_slots(slots)


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
        (_joins_for_nothing, test_what_a_group_has_computed_counts_before_it_is_found),
        (_no_claims, _reserves),
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
