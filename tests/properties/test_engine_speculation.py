"""EngineCore that speculates: guesses, right and wrong, change no output, and leave nothing behind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from manylora_shared.ids import QosClass, TenantId
from manylora_worker.engine.core import EngineCore
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.tenant_shares import TenantShare

from tests.properties.engine_rig import Rig
from tests.properties.engine_suite import (
    Collector,
    FaultyAheadRunner,
    FaultyRunner,
    expected,
    make_engine,
    make_request,
)
from tests.properties.test_engine_machine import EngineMachine

SPECULATING = frozenset(QosClass)


def _guess(sequence: Sequence, most: int) -> SequenceOf[int] | None:
    """In place of Sequence.guess: by what will be drawn, right up to a place that the sequence's length decides."""
    if not sequence.group.speculates:
        return ()
    if sequence.num_pending_tokens:
        return None if sequence.num_guesses or sequence.num_tokens % 5 else ()
    known = len(sequence.output_token_ids)
    most = min(most, sequence.max_output_tokens - known - 1, 1 + sequence.num_tokens % 7)
    will_be = expected(sequence.group.request, sequence.choice)[known : known + most]
    num_right = sequence.num_tokens % 4
    return [token if i < num_right else 258 - token for i, token in enumerate(will_be)]


class SpeculatingMachine(EngineMachine):
    make_runner = FaultyAheadRunner

    num_right = 0  # over all runs

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        prompt=st.lists(st.integers(1, 9), min_size=1, max_size=12),
        max_tokens=st.integers(8, 24),
        n=st.integers(1, 3),
        greedy=st.booleans(),
        has_stop=st.booleans(),
    )
    def add_plain(self, tenant: str, prompt: list[int], max_tokens: int, n: int, greedy: bool, has_stop: bool) -> None:
        """From here on all speculate."""
        self.core._shares.speculates = lambda flow: True  # type: ignore[method-assign]
        self.add(tenant, None, prompt, max_tokens, n, 0, greedy, has_stop)
        self.steps(12)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            SpeculatingMachine.num_right += self.core.stats().right_guesses


@pytest.fixture
def guesses_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "guess", _guess)


@pytest.mark.long
@pytest.mark.usefixtures("guesses_are_made_up")
class TestSpeculatingCore(SpeculatingMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=400, stateful_step_count=30, deadline=None, derandomize=True)

    def runTest(self) -> None:
        super().runTest()
        assert SpeculatingMachine.num_right > 100


@pytest.mark.usefixtures("guesses_are_made_up")
@pytest.mark.parametrize("make_runner", [FaultyRunner, FaultyAheadRunner])
@pytest.mark.parametrize("n", [1, 3])
def test_every_token_is_the_references_in_fewer_steps(
    n: int, make_runner: type[FaultyRunner | FaultyAheadRunner]
) -> None:
    steps = []
    for speculating in (frozenset[QosClass](), SPECULATING):
        core, runner = make_engine(64, make_runner=make_runner)
        core.set_share(TenantId("a"), TenantShare(speculating=speculating))
        seen = Collector()
        request = make_request("r", 8, 28, n=n)
        core.add(request, 0.0)
        seen.add(request)
        while core.has_work():
            seen.take(core.step(0.0), core.take_ended())
            core.check_invariants()
        assert not runner.faults
        stats = core.stats()
        steps.append(stats.steps)
        assert (stats.guessed_tokens > stats.right_guesses > 0) == bool(speculating)
        assert core.flows()[TenantId("a"), QosClass.STANDARD].output_tokens == 28 * n
    assert steps[1] < steps[0]


def test_what_looks_at_earlier_draws_is_not_guessed() -> None:
    core, _ = make_engine(64)
    core.set_share(TenantId("a"), TenantShare(speculating=SPECULATING))
    plain = make_request("plain", 4, 4)
    core.add(plain, 0.0)
    assert core._requests[plain.request_id].speculates
    for name, fields in {
        "penalty": {"presence_penalty": 0.5},
        "bias": {"logit_bias": {3: 1.0}},
        "logprobs": {"top_logprobs": 1},
        "bars": {"min_tokens": 3},
    }.items():
        request = make_request(name, 4, 4)
        object.__setattr__(request, "sampling", type(request.sampling)(seed=7, **fields))
        core.add(request, 0.0)
        assert not core._requests[request.request_id].speculates, name


def test_an_answer_that_repeats_itself_is_guessed_by_lookup() -> None:
    class Repeating(FaultyAheadRunner):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            self._draw.draw = lambda sampling, choice, index, uid, context: (index % 6, None)  # type: ignore[method-assign]

    steps = {}
    for speculating in (frozenset[QosClass](), SPECULATING):
        rig = Rig.make(256, 4, make_runner=Repeating)
        rig.core.set_share(TenantId("a"), TenantShare(speculating=speculating))
        request_id = rig.add(TenantId("a"), 8, 200)
        tokens: list[int] = []
        while rig.core.has_work():
            tokens += [token for output in rig.core.step(0.0) for token in output.token_ids]
            rig.core.check_invariants()
        assert tokens == [i % 6 for i in range(200)], request_id
        steps[bool(speculating)] = rig.core.stats().steps
    assert steps[True] < steps[False] / 3


HOST_S, DEVICE_S, ROW_S = 0.9, 1.0, 0.05


def paced(core: EngineCore) -> tuple[list[int], float]:
    """One answer's tokens, and what it takes from its first one on where a plain step takes the device a second, and
    the host nearly one beside it: who waits for a draw has both.
    """
    now, free_at, due = 0.0, 0.0, deque[float]()
    tokens: list[int] = []
    began = 0.0
    while core.has_work():
        now += HOST_S
        batch = core.begin_step(now)
        if batch is not None:
            core.submit(batch, now)
            num_rows = sum(len(chunk.token_ids) for chunk in batch.chunks)
            free_at = max(free_at, now) + DEVICE_S + (num_rows - 1) * ROW_S
            due.append(free_at)
        if core.must_wait or (batch is None and core.num_in_flight):
            now = max(now, due.popleft())
            core.end_step(core.wait(), now)
        outputs = core.take_outputs()
        if outputs and not tokens:
            began = now
        tokens += [token for output in outputs for token in output.token_ids]
        core.check_invariants()
    return tokens, now - began


WRONG = [(None, 1.5), (40, 1.5), (6, 0.97), (4, 0.97), (3, 0.97), (2, 0.97)]


@pytest.mark.parametrize(("one_wrong_in", "least"), WRONG)
def test_speculation_gains_where_text_repeats_itself_and_loses_little_where_not(
    one_wrong_in: int | None, least: float
) -> None:
    class Repeating(FaultyAheadRunner):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            rng = random.Random(5)
            text = [i % 6 if one_wrong_in is None or rng.random() > 1 / one_wrong_in else 6 for i in range(500)]
            self._draw.draw = lambda sampling, choice, index, uid, context: (text[index], None)  # type: ignore[method-assign]

    found = {}
    for speculating in (frozenset[QosClass](), SPECULATING):
        rig = Rig.make(512, 4, make_runner=Repeating)
        rig.core.set_share(TenantId("a"), TenantShare(speculating=speculating))
        rig.add(TenantId("a"), 8, 400)
        found[bool(speculating)] = paced(rig.core)
    assert found[True][0] == found[False][0]
    assert found[False][1] / found[True][1] >= least
