"""Constrained choices in the engine: the reference's tokens, however late each mask is made."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.ids import RequestId
from manylora_sim.fake_runner import reference_tokens
from manylora_worker.engine.core import EngineCore
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.memory.tenant_shares import TenantShare

from tests.properties.engine_rig import BLOCK, A, B, C, Rig
from tests.properties.engine_suite import (
    CONTEXT,
    EOS,
    EOS_ONE_IN,
    FaultyAheadRunner,
    FaultyRunner,
    make_engine,
    make_request,
)
from tests.properties.odd import Matcher, Odd, allows

RUNNERS = [FaultyRunner, FaultyAheadRunner]


def wanted(request: EngineRequest, choice: int) -> list[int]:
    kind = request.constraint
    assert isinstance(kind, Odd)
    count = min(request.max_tokens, CONTEXT - len(request.prompt_token_ids), kind.length, kind.breaks_at)
    return reference_tokens(
        request.prompt_token_ids, None, request.sampling.seed, choice, count, eos_token_id=EOS, eos_one_in=EOS_ONE_IN,
        stop_token_ids=request.stop_token_ids, min_tokens=request.sampling.min_tokens, allows=allows,
        emitted_token_ids=request.emitted_of(choice),
    )  # fmt: skip


def run(core: EngineCore, requests: SequenceOf[EngineRequest], aborted: frozenset[int] = frozenset()) -> dict[str, int]:
    """Every answer is checked. Returns the steps that each request took."""
    tokens = {(r.request_id, c): list(r.emitted_of(c)) for r in requests for c in range(r.n)}
    reasons: dict[tuple[RequestId, int], FinishReason | None] = dict.fromkeys(tokens)
    for request in requests:
        core.add(request, 0.0)
    steps: dict[str, int] = {}
    for turn in range(5000):
        if not core.has_work() and not core.num_in_flight:
            break
        if turn == 9:
            for i in aborted:
                core.abort(RequestId(f"r{i}"), 0.0)
        for output in core.step(0.0):
            tokens[output.request_id, output.choice] += output.token_ids
            reasons[output.request_id, output.choice] = output.finish_reason
            steps[output.request_id] = core.stats().steps
        core.take_ended()
        core.check_invariants()
    assert not core.has_work(), "it stands still"
    assert core.step_error is None
    for request in requests:
        kind = request.constraint
        assert isinstance(kind, Odd)
        for choice in range(request.n):
            found, want = tokens[request.request_id, choice], wanted(request, choice)
            match reasons[request.request_id, choice]:
                case FinishReason.ABORTED:
                    assert request.request_id in {f"r{i}" for i in aborted}
                    assert found == want[: len(found)]
                case FinishReason.ERROR:  # of one choice, and so of all
                    assert found == want[: len(found)]
                    assert kind.breaks_at < 1000
                case reason:
                    assert (found, reason) == (want, FinishReason.STOP) or (
                        found == want and reason is FinishReason.LENGTH
                    )
    return steps


shapes = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt
        st.integers(1, 20),  # max_tokens
        st.sampled_from([1, 1, 2, 3]),  # n
        st.sampled_from([0, 30, 100]),  # late
        st.sampled_from([1000, 1000, 1, 6]),  # length
        st.sampled_from([1000, 1000, 1000, 4]),  # breaks_at
        st.sampled_from([0, 0, 5]),  # min_tokens
    ),
    min_size=1,
    max_size=7,
)


def request_of(i: int, shape: tuple[int, int, int, int, int, int, int]) -> EngineRequest:
    prompt, max_tokens, n, late, length, breaks_at, min_tokens = shape
    return replace(
        make_request(f"r{i}", prompt, max_tokens, n=n, tenant=f"t{i % 3}"),
        constraint=Odd(late, length, breaks_at),
        stop_token_ids=frozenset([EOS]),
        sampling=Sampling(seed=i, min_tokens=min(min_tokens, max_tokens)),
    )


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes,
    num_blocks=st.integers(14, 40),
    make_runner=st.sampled_from(RUNNERS),
    aborted=st.frozensets(st.integers(0, 6), max_size=2),
)
def test_answers_are_the_references_however_late_masks_are(
    shapes: list[tuple[int, int, int, int, int, int, int]],
    num_blocks: int,
    make_runner: type[FaultyRunner | FaultyAheadRunner],
    aborted: frozenset[int],
) -> None:
    core, runner = make_engine(num_blocks, make_runner=make_runner)
    run(core, [request_of(i, shape) for i, shape in enumerate(shapes)], aborted)
    assert not runner.faults
    assert core.stats().blocks_free == num_blocks


@pytest.mark.parametrize("make_runner", RUNNERS)
def test_masks_that_are_there_in_time_cost_no_step(make_runner: type[FaultyRunner | FaultyAheadRunner]) -> None:
    core, _ = make_engine(64, make_runner=make_runner)
    requests = [request_of(i, (4, 20, 1, 0, 1000, 1000, 20)) for i in range(4)]
    run(core, requests)
    assert core.stats().generated_tokens == 80
    assert core.stats().steps <= 26, "halves of the batch take turns"


def test_a_row_whose_masks_are_late_delays_no_other() -> None:
    core, _ = make_engine(64, make_runner=FaultyAheadRunner)
    requests = [request_of(i, (4, 20, 1, 100 * (i == 0), 1000, 1000, 20)) for i in range(4)]
    steps = run(core, requests)
    assert all(steps[f"r{i}"] <= 30 for i in (1, 2, 3))
    assert steps["r0"] > 40


def test_a_step_that_fails_beside_masks_ends_its_requests_alone() -> None:
    core, runner = make_engine(64, make_runner=FaultyAheadRunner)
    assert isinstance(runner, FaultyAheadRunner)
    core.add(request_of(0, (4, 20, 2, 30, 1000, 1000, 20)), 0.0)
    for _ in range(7):
        core.step(0.0)
    runner.fail_next_result = True
    while core.has_work():
        core.step(0.0)
    assert isinstance(core.step_error, RuntimeError)
    run(core, [request_of(1, (4, 20, 1, 30, 1000, 1000, 0))])


class Stuck(Matcher):
    def take(self, token_ids: SequenceOf[int]) -> None:
        super().take(token_ids)
        self._polls = 1 << 30 if len(self._output) >= 3 else 0


class NeverReady(Odd):
    """A grammar whose masks, but for the first, take longer than the test."""

    end_token_ids = (2,)

    def matcher(self) -> Matcher:
        return Stuck(self)


def test_who_waits_for_a_mask_gives_its_blocks_and_slot_to_who_can_use_them() -> None:
    """a is above its soft share; b goes on all the time; what c wants is there without a's blocks alone."""
    rng = random.Random(2)
    rig = Rig.make(100, 8, batch_tokens=256)
    rig.core.set_share(A, TenantShare(soft_blocks=10))

    def steps(count: int, short_ones: int) -> None:
        for _ in range(count):
            here = [request_id for request_id in rig.requests if request_id not in rig.ended]
            for _ in range(short_ones - sum(request_id.startswith(B) for request_id in here)):
                rig.add(B, rng.randint(8, 16), rng.randint(16, 40))
            rig.step()

    for _ in range(8):
        rig.add(A, 60, 4)
        steps(8, 1)
    stuck = replace(make_request("stuck", 150, 40, tenant=A), constraint=NeverReady(100))
    rig.core.add(stuck, float(rig.steps))
    steps(40, 1)
    assert rig.core.blocks_held_by(A) > 40
    long = rig.add(C, 66 * BLOCK, 4)
    before = len(rig.ended)
    steps(200, 4)
    assert long in rig.ended
    assert len(rig.ended) - before > 20, "b, too"
