"""Sequences whose KV goes to host memory and comes back: no block is lost or has two owners, no text changes by it.

The engine's core over the fake runners, whose copies read and write when they are over, and complain where anything
touches a block meanwhile. Each mutant breaks one rule; the same checks must fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import AheadFakeRunner, EngineFault, FakeAdapterBackend, FakeRunner
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.adapters.loading import LOOK_AGAIN_S
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.counters import Setbacks
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.kinds.sequence import Sequence, SequenceStatus, SwapStage
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.swapping import HostBlocks, SwapCosts, Swapper
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.step_planner import PlannerLimits

from tests.properties.engine_rig import Rig, assert_all_is_counted_once, fight

_A, _B, _C = TenantId("a"), TenantId("b"), TenantId("c")
_RUNNERS = [FakeRunner, AheadFakeRunner]
_LITTLE = TenantShare(soft_blocks=4)
"""What is above it goes to whoever asks, at the end of a unit."""


# ---- what is cheaper


def test_the_cheaper_is_chosen() -> None:
    costs = SwapCosts(block_copy_s=2e-3)
    assert costs.swap_s(10) == pytest.approx(0.02)
    assert costs.swap_s(10) < costs.recompute_s(1), "nothing was measured: a swap costs the device nothing"
    assert costs.recompute_s(0) == 0.0
    costs.computed(100, 100, 0.1)
    assert costs.prefill_tokens_per_s == pytest.approx(1000)
    assert costs.recompute_s(160) == pytest.approx(0.16)
    assert costs.recompute_s(19) < costs.swap_s(10) < costs.recompute_s(21)


def test_copies_and_prefills_are_measured_and_steps_that_decode_are_not() -> None:
    costs = SwapCosts(block_copy_s=2e-3)
    for _ in range(100):
        costs.copied(5, 5 * 4e-3)
    assert costs.swap_s(1) == pytest.approx(8e-3)
    for _ in range(100):
        costs.computed(40, 64, 0.01)
        costs.computed(10, 64, 0.5)
        costs.computed(64, 64, 0.0)
    assert costs.prefill_tokens_per_s == pytest.approx(6400)


def _one_parked(block_copy_s: float, seconds_a_step: float) -> Rig:
    """b takes what a's parked sequence holds, of 64 tokens and what it drew."""
    rig = Rig.make(30, 1, num_host_blocks=60)
    rig.is_timed = False
    rig.core._swapper.costs = SwapCosts(block_copy_s)
    rig.add(_A, 64, 40)
    now = 0.0
    while not rig.tokens or len(rig.tokens[RequestId("a1"), 0]) < 4:
        batch = rig.core.begin_step(now)
        assert batch is not None
        rig.core.submit(batch, now)
        now += seconds_a_step
        rig.core.end_step(rig.core.wait(), now)
        for output in rig.core.take_outputs():
            rig.tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    rig.core.set_share(_A, _LITTLE)
    rig.add(_B, 80, 4)
    while rig.core.has_work():
        rig.step()
    return rig


@pytest.mark.parametrize(
    ("block_copy_s", "seconds_a_step", "swaps"),
    [(1e-3, 1.0, 1), (1.0, 1e-3, 0), (1e-3, 16 / 64 * 17e-3, 1), (1e-3, 16 / 64 * 15e-3, 0)],
    ids=["slow model", "slow copies", "just slow enough", "just not"],
)
def test_who_loses_its_blocks_is_swapped_where_that_is_cheaper(
    block_copy_s: float, seconds_a_step: float, swaps: int
) -> None:
    """17 blocks and some 68 tokens at stake; a prefill step has 16 tokens."""
    rig = _one_parked(block_copy_s, seconds_a_step)
    stats = rig.core.stats()
    assert (stats.swaps_out, stats.swaps_in, stats.evictions) == (swaps, swaps, 1 - swaps)
    assert rig.setbacks == {_A: Setbacks(1, swaps, 1 - swaps, 0 if swaps else stats.recomputed_tokens)}
    assert (stats.recomputed_tokens > 64) == (not swaps)


def test_while_kv_is_copied_it_is_asked_often_whether_that_is_over() -> None:
    """Also where nothing else is to be looked at: an adapter is being loaded for ever, and the others' readers stop."""
    runner = FakeRunner(num_blocks=30, block_size=4, num_host_blocks=60, copy_polls=5)
    backend = FakeAdapterBackend(lambda: 0.0, load_s=lambda uid, tier: 1.0)
    core = EngineCore(runner, backend, EngineLimits(PlannerLimits(48, 16, 1), AdapterCacheLimits(8, 8), 8))

    def add(tenant: TenantId, prompt: int, uid: AdapterUid | None = None) -> None:
        asked = Sampling(seed=1)
        ids = tuple(range(prompt))
        core.add(EngineRequest(RequestId(tenant), tenant, QosClass.STANDARD, uid, ids, 40, asked), 0.0)

    add(_C, 4, AdapterUid("u"))
    core.step(0.0)
    core.step(0.0)
    assert core.rest_s() == LOOK_AGAIN_S
    add(_A, 64)
    core.set_share(_A, _LITTLE)
    add(_B, 80)
    while not core._swapper.num_copying or core.stats().running_sequences:
        core.step(0.0)
    core.pause(RequestId(_A))
    core.pause(RequestId(_B))
    rests = []
    while core._swapper.num_copying:
        core.step(0.0)
        rests.append(core.rest_s())
    assert all(rest_s is not None and rest_s < LOOK_AGAIN_S for rest_s in rests[:-1])
    assert len(rests) > 3
    assert rests[-1] == LOOK_AGAIN_S


# ---- host blocks


def test_a_tenant_has_of_the_host_what_its_bounds_give_it_of_the_device() -> None:
    shares = TenantShares(100)
    shares.set(_A, TenantShare(hard_blocks=20))
    host = HostBlocks(50, shares, 100)
    assert (host.bound(_A), host.bound(_B)) == (10, 25)
    assert host.has_room(_A, 10)
    assert not host.has_room(_A, 11)
    assert host.has_room(_B, 25)
    assert not host.has_room(_B, 26)
    shares.set(_C, TenantShare(reserve_blocks=40))
    blocks = host.allocate(_B, 25)
    assert host.allocate(_A, 5)
    assert not host.has_room(_A, 1), "20 are c's by its reserve"
    assert host.has_room(_C, 20)
    host.free(_B, blocks)
    assert host.held() == {_A: 5}


def test_without_host_blocks_nothing_leaves() -> None:
    rig = fight(0)
    assert rig.core.stats().swaps_out == 0
    assert sum(each.preemptions for each in rig.setbacks.values()) > 0


# ---- contention


@pytest.mark.long
@pytest.mark.parametrize("make_runner", _RUNNERS)
@pytest.mark.parametrize("copy_polls", range(4))
def test_three_tenants_fight_and_are_swapped(copy_polls: int, make_runner: type[FakeRunner]) -> None:
    parked, swapped, recomputed = 0, 0, 0
    for seed in range(5 * copy_polls, 5 * copy_polls + 5):
        rig = fight(seed, make_runner=make_runner, num_host_blocks=16, copy_polls=copy_polls)
        stats = rig.core.stats()
        assert stats.swaps_in == stats.swaps_out, "nothing ends on the host by itself"
        assert stats.blocks_out >= stats.blocks_in
        assert_all_is_counted_once(rig)
        parked, swapped, recomputed = (
            parked + stats.preemptions,
            swapped + stats.swaps_out,
            recomputed + stats.evictions,
        )
    assert min(parked, swapped, recomputed) > 10, "not all of it happened: the test shows nothing"


@pytest.mark.long
@pytest.mark.parametrize("make_runner", _RUNNERS)
@pytest.mark.parametrize("seed", range(10))
def test_and_with_readers_that_stop_and_go_on(seed: int, make_runner: type[FakeRunner]) -> None:
    rig = fight(seed, pauses=0.2, make_runner=make_runner, num_host_blocks=60, copy_polls=seed % 3)
    assert rig.core.stats().swaps_out > 0
    assert_all_is_counted_once(rig)


def test_who_needs_no_blocks_goes_on_while_others_wait_for_copies() -> None:
    """c's copy takes its time. b waits for its blocks; a, whose turns come after b's, decodes on meanwhile."""
    rig = Rig.make(46, 3, num_host_blocks=80, copy_polls=30)
    running = rig.add(_A, 8, 60)
    rig.core.set_share(_C, _LITTLE)
    rig.add(_C, 100, 40)
    for _ in range(20):
        rig.step()
    waiting = rig.add(_B, 80, 4)
    while not rig.core._swapper.num_copying:
        rig.step()
    at, before = rig.steps, len(rig.tokens[running, 0])
    for _ in range(20):
        rig.step()
    assert rig.core._swapper.num_copying, "the copy is over: the test shows nothing"
    assert not rig.is_admitted(waiting)
    assert len(rig.tokens[running, 0]) - before >= min(rig.steps - at, 60 - before) - 1
    while rig.core.has_work():
        rig.step()
    assert len(rig.ended) == 3


# ---- the ends of those that are on their way


def _at_stage(stage: SwapStage, make_runner: type[FakeRunner], n: int = 1) -> tuple[Rig, Sequence]:
    """a's request is at this stage, and b's is why."""
    rig = Rig.make(30, 2, make_runner=make_runner, num_host_blocks=80, copy_polls=3)
    rig.add(_A, 64, 40, n=n)
    rig.core.set_share(_A, _LITTLE)
    for _ in range(12):
        rig.step()
    rig.add(_B, 80, 24)
    while True:
        for sequence in rig.core._requests.sequences:
            if sequence.swap is not None and sequence.swap.stage is stage:
                return rig, sequence
        rig.step()
        assert rig.steps < 200, f"nothing is ever {stage}"


@pytest.mark.parametrize("make_runner", _RUNNERS)
@pytest.mark.parametrize("stage", SwapStage)
@pytest.mark.parametrize("is_paused", [False, True])
def test_an_abort_at_any_stage_frees_all_when_the_copy_is_over(
    stage: SwapStage, make_runner: type[FakeRunner], is_paused: bool
) -> None:
    rig, sequence = _at_stage(stage, make_runner)
    request_id = sequence.group.request.request_id
    held, on_host = list(sequence.block_table), rig.core.host_blocks_held()
    if is_paused:
        rig.core.pause(request_id)
    rig.core.abort(request_id, 0.0)
    rig.core.check_invariants()
    if stage is SwapStage.ON_HOST:
        assert rig.core.host_blocks_held() == {}
    else:
        assert sequence.block_table == held, "given away while it is being copied"
        assert rig.core.host_blocks_held() == on_host
        assert request_id in rig.core.request_ids(), "ended before its copy was over"
    while rig.core.has_work():
        rig.step()
    assert request_id in rig.ended
    assert len(rig.ended) == 2
    stats = rig.core.stats()
    assert (stats.blocks_free, stats.host_blocks_free, stats.requests) == (stats.blocks_total, 80, 0)


@pytest.mark.parametrize("make_runner", _RUNNERS)
@pytest.mark.parametrize("stage", SwapStage)
def test_a_drain_ends_the_copies(stage: SwapStage, make_runner: type[FakeRunner]) -> None:
    rig, _ = _at_stage(stage, make_runner)
    for request_id in rig.core.request_ids():
        rig.core.abort(request_id, 0.0)
    rig.core.drain(0.0)
    assert len(rig.ended) + len(rig.core.take_ended()) == 2
    stats = rig.core.stats()
    assert (stats.blocks_free, stats.host_blocks_free, stats.requests) == (stats.blocks_total, 80, 0)
    rig.core.check_invariants()
    assert not rig.core.has_work()


@pytest.mark.parametrize("stage", SwapStage)
def test_one_choice_is_stopped_and_the_other_goes_on(stage: SwapStage) -> None:
    rig, sequence = _at_stage(stage, AheadFakeRunner, n=2)
    request = sequence.group.request
    rig.core.stop_choice(request.request_id, sequence.choice, 0.0)
    while rig.core.has_work():
        outputs = rig.core.step(0.0)
        rig.core.check_invariants()
        for output in outputs:
            rig.tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    assert len(rig.tokens[request.request_id, 1 - sequence.choice]) == request.max_tokens
    assert len(rig.tokens[request.request_id, sequence.choice]) < request.max_tokens
    stats = rig.core.stats()
    assert (stats.blocks_free, stats.host_blocks_free) == (stats.blocks_total, 80)


@pytest.mark.parametrize("stage", SwapStage)
def test_one_whose_reader_stops_comes_back_when_it_reads(stage: SwapStage) -> None:
    rig, sequence = _at_stage(stage, AheadFakeRunner)
    request_id = sequence.group.request.request_id
    rig.core.pause(request_id)
    while rig.core.has_work():
        rig.step()
    assert sequence.status in (SequenceStatus.SWAPPED, SequenceStatus.DECODE, SequenceStatus.PREFILL)
    assert not sequence.is_copying
    rig.core.resume(request_id)
    while rig.core.has_work():
        rig.step()
    assert request_id in rig.ended


def test_a_failed_step_does_not_have_what_came_back_cleared() -> None:
    """A block is to be cleared in a step. Who held it is gone meanwhile, and its next owner's KV is copied into it;
    then the step fails, and its clears are due again."""
    pool = BlockPool(2, 4)
    pool.free(_A, pool.allocate(_A, 2))
    (block,) = pool.allocate(_B, 1)
    work = pool.take_work()
    assert list(work.clears) == [block]
    pool.free(_B, [block])
    held = pool.allocate(_C, 2)
    pool.overwrite([block])
    pool.reject(work)
    assert block in held
    assert block not in pool.pending_clears()
    pool.free(_C, held)
    (again,) = pool.allocate(_A, 1)
    assert pool.pending_clears() == [again], "c's KV is not for a"
    pool.check_invariants()


# ---- the checks can fail


def _frees_before_the_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Parking.swap_or_evict

    def broken(self: Parking, sequence: Sequence) -> None:
        leave(self, sequence)
        if sequence.is_copying:
            self._tables.lose(sequence)

    monkeypatch.setattr(Parking, "swap_or_evict", broken)


def _leaves_a_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    count = Swapper._num_computed_blocks
    monkeypatch.setattr(Swapper, "_num_computed_blocks", lambda self, sequence: max(1, count(self, sequence) - 1))


def _clears_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "overwrite", lambda self, block_ids: None)


def _comes_back_before_the_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swapper, "poll", lambda self: list(self._copies))
    ended = Swapper.ended

    def broken(self: Swapper, sequence: Sequence) -> SwapStage:
        self._copies.pop(sequence)
        return ended(self, sequence)

    monkeypatch.setattr(Swapper, "ended", broken)


def _keeps_host_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Swapper, sequence: Sequence) -> None:
        sequence.swap = None

    monkeypatch.setattr(Swapper, "forget", broken)


def _no_bound_on_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlocks, "bound", lambda self, tenant_id: self.num_blocks)


def _drops_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Swapper.leave

    def broken(self: Swapper, sequence: Sequence) -> None:
        if sequence.output_token_ids:
            sequence.output_token_ids.pop()
        leave(self, sequence)

    monkeypatch.setattr(Swapper, "leave", broken)


def _fights() -> None:
    for seed in range(10):
        rig = fight(seed, make_runner=AheadFakeRunner, num_host_blocks=24, copy_polls=2)
        assert_all_is_counted_once(rig)


@pytest.mark.parametrize(
    "mutant",
    [
        _frees_before_the_copy_is_over,
        _leaves_a_block_behind,
        _clears_what_came_back,
        _comes_back_before_the_copy_is_over,
        _keeps_host_blocks,
        _no_bound_on_a_tenant,
        _drops_a_token,
    ],
)
def test_a_mutant_fails(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    monkeypatch.setattr(EngineCore, "check_invariants", lambda self: None)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, EngineFault)):
        _fights()
