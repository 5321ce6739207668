"""How long steps take, and how many prompt tokens they get for it: StepTime by itself, and in the engine."""

from __future__ import annotations

import random

import pytest
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling, StepBatch
from manylora_worker.planning.staggering import Staggering
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.planning.step_targets import StepTargets
from manylora_worker.planning.step_time import LEAST_PROMPT_TOKENS, StepTime

DECODE_S, TOKEN_S = 0.005, 0.0001
TARGET_S = 0.02


def seconds(num_prompt_tokens: int, fixed_s: float = 0.0) -> float:
    """What a step takes on some device."""
    return DECODE_S + (fixed_s + num_prompt_tokens * TOKEN_S) * (num_prompt_tokens > 0)


def settled(time: StepTime, *, target_s: float = TARGET_S, fixed_s: float = 0.0, limit: int = 512) -> int:
    """Prompt tokens of a step after sixty that have as many as they may."""
    count = limit
    for _ in range(60):
        count = min(limit, time.max_prompt_tokens(target_s) or limit)
        time.measured(count, seconds(count, fixed_s))
    return count


@pytest.mark.parametrize("fixed_s", [0.0, 0.004])
@pytest.mark.parametrize("decodes_alone", [True, False])
def test_steps_come_to_take_the_target(decodes_alone: bool, fixed_s: float) -> None:
    """Where prompts cost something beside their tokens as well, and where no step only decodes."""
    time = StepTime()
    if decodes_alone:
        time.measured(0, DECODE_S)
    assert seconds(settled(time, fixed_s=fixed_s), fixed_s) == pytest.approx(TARGET_S, rel=0.02)


def test_a_device_that_is_fast_enough_is_not_held_up() -> None:
    assert settled(StepTime(), target_s=1.0) == 512


def test_a_step_is_expected_to_take_what_such_steps_took() -> None:
    time = StepTime()
    assert time.expected(0) == time.expected(100) == 0
    for count in (0, 100, 300) * 20:
        time.measured(count, seconds(count))
    for count in (0, 50, 200):
        assert time.expected(count) == pytest.approx(seconds(count), rel=0.05)


def test_without_a_target_any_number_goes() -> None:
    time = StepTime()
    time.measured(512, 100.0)
    assert time.max_prompt_tokens(None) is None


def test_prompts_go_on_where_decoding_alone_takes_longer_than_the_target() -> None:
    time = StepTime()
    time.measured(0, 10 * TARGET_S)
    time.measured(512, 20 * TARGET_S)
    assert time.max_prompt_tokens(TARGET_S) == LEAST_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("prompts", "of_a_step"),
    [
        pytest.param([16] * 4, [32, 32], id="short ones"),
        pytest.param([40, 16, 16, 16], [40, 32, 16], id="the first is longer than what several get"),
        pytest.param([150], [64, 64, 22], id="a long one"),
    ],
)
def test_beside_slow_decodes_a_long_prompt_goes_on_faster_than_several_short_ones_together(
    prompts: list[int], of_a_step: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staggering, "holds_back", lambda self, num_ended: False)  # time alone is what holds them up
    limits = EngineLimits(
        PlannerLimits(512, 256, 8, StepTargets(standard=TARGET_S)), AdapterCacheLimits(1, 1), max_requests=64
    )
    core = EngineCore(FakeRunner(num_blocks=1024, block_size=16), FakeAdapterBackend(lambda: 0.0), limits)
    core.add(_request("decodes", 8, 400), 0.0)
    now, counts = 0.0, []
    for step in range(40):
        if step == 20:
            for i, tokens in enumerate(prompts):
                core.add(_request(f"r{i}", tokens, 50), now)
        batch = core.begin_step(now)
        assert batch is not None
        counts.append(_prompt_tokens(batch))
        core.submit(batch, now)
        now += 10 * seconds(counts[-1])
        core.end_step(core.wait(), now)
        core.take_outputs()
    assert [count for count in counts[20:] if count] == of_a_step


def test_one_step_that_was_held_up_cuts_the_next_ones_by_little() -> None:
    time = StepTime()
    time.measured(0, DECODE_S)
    before = settled(time)
    time.measured(before, 100.0)
    assert (time.max_prompt_tokens(TARGET_S) or 0) >= 0.8 * before
    time.measured(0, 100.0)
    assert (time.max_prompt_tokens(TARGET_S) or 0) >= 0.7 * before


@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0, 100.0])
@pytest.mark.parametrize("decodes_alone", [True, False])
def test_a_device_that_is_slow_at_each_step_is_held_to_the_target_from_the_second_one_on(
    decodes_alone: bool, slower: float
) -> None:
    time, rng = StepTime(), random.Random(1)
    if decodes_alone:
        time.measured(0, slower * DECODE_S)
    time.measured(512, slower * seconds(512))
    lengths = []
    for _ in range(40):
        count = time.max_prompt_tokens(TARGET_S) or 512
        took = slower * seconds(count)
        lengths.append(took)
        time.measured(count, took * rng.uniform(0.8, 1.2))
    least = slower * seconds(LEAST_PROMPT_TOKENS)
    assert max(lengths) <= max(2 * TARGET_S, least)
    assert max(lengths[16:]) <= max(1.1 * TARGET_S, least)


@pytest.mark.parametrize(("target_s", "longest_s"), [(None, 0.056), (TARGET_S, 0.0205)])
def test_beside_long_prompts_decodes_get_their_tokens_in_time(target_s: float | None, longest_s: float) -> None:
    runner = FakeRunner(num_blocks=1024, block_size=16)
    backend = FakeAdapterBackend(lambda: 0.0)
    limits = EngineLimits(
        PlannerLimits(512, 256, 8, StepTargets(standard=target_s)), AdapterCacheLimits(1, 1), max_requests=64
    )
    core = EngineCore(runner, backend, limits)
    for i in range(8):
        prompt, output = (1500, 4) if i else (8, 200)
        core.add(_request(f"r{i}", prompt, output), 0.0)
    now, lengths, ends = 0.0, [], 0
    while core.has_work():
        batch = core.begin_step(now)
        assert batch is not None
        core.submit(batch, now)
        took = seconds(_prompt_tokens(batch))
        lengths.append(took)
        now += took
        core.end_step(core.wait(), now)
        core.take_outputs()
        ends += len(core.take_ended())
        core.check_invariants()
    assert ends == 8
    assert max(lengths[10:]) == pytest.approx(longest_s, rel=0.05)


@pytest.mark.parametrize(
    ("others", "most_s"),
    [(QosClass.BATCH, 0.03), (QosClass.STANDARD, 0.018), (QosClass.INTERACTIVE, 0.013)],
)
@pytest.mark.parametrize("is_waiting", [False, True])
def test_steps_of_batch_work_are_long_while_it_is_alone(others: QosClass, most_s: float, is_waiting: bool) -> None:
    """A request of another class makes them short where it runs, and where it waits for a slot, too."""
    targets = StepTargets(interactive=0.013, standard=0.018, batch=0.03)
    limits = EngineLimits(
        PlannerLimits(512, 256, 1 if is_waiting else 8, targets), AdapterCacheLimits(1, 1), max_requests=64
    )
    core = EngineCore(FakeRunner(num_blocks=4096, block_size=16), FakeAdapterBackend(lambda: 0.0), limits)
    for i in range(4):
        core.add(_request(f"batch{i}", 3000, 2, QosClass.BATCH), 0.0)
    now = 0.0
    found: dict[bool, list[tuple[QosClass, float]]] = {False: [], True: []}
    for step in range(40):
        if step == 20:
            core.add(_request("other", 8, 400, others), now)
        batch = core.begin_step(now)
        assert batch is not None
        core.submit(batch, now)
        now += seconds(_prompt_tokens(batch))
        core.end_step(core.wait(), now)
        core.take_outputs()
        found[step >= 20] += core.take_step_times()
    assert max(took for _, took in found[False][8:]) == pytest.approx(0.03, rel=0.1)
    assert {qos_class for qos_class, _ in found[False]} == {QosClass.BATCH}
    assert max(took for _, took in found[True][8:]) <= 1.1 * most_s
    assert {qos_class for qos_class, _ in found[True]} == {others}


FULL_CHUNK = 128
"""So many prompt tokens fit into the target, beside a sequence that decodes."""


def prompt_tokens_of_steps(
    slow_s: dict[int, float], *, first_prompt: int = FULL_CHUNK, num_steps: int = 60
) -> list[int]:
    """Of an engine with a sequence that decodes, and with long prompts from the third step on.

    Args:
        slow_s: steps that take so much longer than their tokens are worth, by their index.
        first_prompt: of the sequence that decodes.
    """
    core = EngineCore(
        FakeRunner(num_blocks=4096, block_size=16),
        FakeAdapterBackend(lambda: 0.0),
        EngineLimits(
            PlannerLimits(512, FULL_CHUNK, 2, StepTargets(standard=TARGET_S)), AdapterCacheLimits(1, 1), max_requests=64
        ),
    )
    core.add(_request("decodes", first_prompt, 400), 0.0)
    now, counts = 0.0, []
    for step in range(num_steps):
        if step > 1 and core.stats().requests < 2:
            core.add(_request(f"r{step}", 10 * FULL_CHUNK, 1), now)
        batch = core.begin_step(now)
        assert batch is not None
        counts.append(_prompt_tokens(batch))
        core.submit(batch, now)
        now += seconds(counts[-1]) + slow_s.get(step, 0.0)
        core.end_step(core.wait(), now)
        core.take_outputs()
        core.take_ended()
    return counts


@pytest.mark.parametrize(
    ("slow_s", "first_prompt", "num_held_up"),
    [
        pytest.param({}, FULL_CHUNK, 1, id="none is"),
        pytest.param({0: 5.0}, FULL_CHUNK, 1, id="the first prompt"),
        pytest.param({1: 5.0}, FULL_CHUNK, 1, id="the first decode"),
        pytest.param({0: 5.0, 1: 5.0}, FULL_CHUNK, 3, id="both"),
        pytest.param({0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0}, FULL_CHUNK, 3, id="several, of other shapes"),
        pytest.param({}, 8, 1, id="a short prompt comes first"),
    ],
)
def test_first_steps_that_are_slow_once_hold_no_prompts_up(
    slow_s: dict[int, float], first_prompt: int, num_held_up: int
) -> None:
    """A device's first steps set things up, or compile kernels: that says nothing of those that follow."""
    counts = prompt_tokens_of_steps(slow_s, first_prompt=first_prompt)[2:]
    assert counts.index(FULL_CHUNK) <= num_held_up


def _prompt_tokens(batch: StepBatch) -> int:
    return sum(len(chunk.token_ids) for chunk in batch.chunks if chunk.output_index == 0)


def _request(request_id: str, prompt: int, output: int, qos_class: QosClass = QosClass.STANDARD) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(request_id),
        tenant_id=TenantId(request_id),
        qos_class=qos_class,
        adapter_uid=None,
        prompt_token_ids=tuple(1 + i % 200 for i in range(prompt)),
        max_tokens=output,
        sampling=Sampling(seed=1),
    )
