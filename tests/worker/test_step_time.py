"""How long steps take, and how many prompt tokens they get for it: StepTime by itself, and in the engine."""

from __future__ import annotations

import pytest
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.api import EngineRequest, Sampling, StepBatch
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.engine.step_planner import PlannerLimits
from manylora_worker.engine.step_time import LEAST_PROMPT_TOKENS, StepTime

DECODE_S, TOKEN_S = 0.005, 0.0001
TARGET_S = 0.02


def seconds(num_prompt_tokens: int, fixed_s: float = 0.0) -> float:
    """What a step takes on some device."""
    return DECODE_S + (fixed_s + num_prompt_tokens * TOKEN_S) * (num_prompt_tokens > 0)


def settled(time: StepTime, *, fixed_s: float = 0.0, limit: int = 512) -> int:
    """Prompt tokens of a step after sixty that have as many as they may."""
    count = limit
    for _ in range(60):
        count = min(limit, time.max_prompt_tokens() or limit)
        time.measured(count, seconds(count, fixed_s))
    return count


@pytest.mark.parametrize("fixed_s", [0.0, 0.004])
@pytest.mark.parametrize("decodes_alone", [True, False])
def test_steps_come_to_take_the_target(decodes_alone: bool, fixed_s: float) -> None:
    """Where prompts cost something beside their tokens as well, and where no step only decodes."""
    time = StepTime(TARGET_S)
    if decodes_alone:
        time.measured(0, DECODE_S)
    assert seconds(settled(time, fixed_s=fixed_s), fixed_s) == pytest.approx(TARGET_S, rel=0.02)


def test_a_device_that_is_fast_enough_is_not_held_up() -> None:
    time = StepTime(1.0)
    assert settled(time) == 512


def test_without_a_target_any_number_goes() -> None:
    time = StepTime(None)
    time.measured(512, 100.0)
    assert time.max_prompt_tokens() is None


def test_prompts_go_on_where_decoding_alone_takes_longer_than_the_target() -> None:
    time = StepTime(TARGET_S)
    time.measured(0, 10 * TARGET_S)
    time.measured(512, 20 * TARGET_S)
    assert time.max_prompt_tokens() == LEAST_PROMPT_TOKENS


def test_one_step_that_was_held_up_cuts_the_next_ones_by_little() -> None:
    time = StepTime(TARGET_S)
    time.measured(0, DECODE_S)
    before = settled(time)
    time.measured(before, 100.0)
    assert (time.max_prompt_tokens() or 0) >= 0.8 * before
    time.measured(0, 100.0)
    assert (time.max_prompt_tokens() or 0) >= 0.7 * before


@pytest.mark.parametrize(("target_s", "longest_s"), [(None, 0.056), (TARGET_S, 0.0205)])
def test_beside_long_prompts_decodes_get_their_tokens_in_time(target_s: float | None, longest_s: float) -> None:
    runner = FakeRunner(num_blocks=1024, block_size=16)
    backend = FakeAdapterBackend(lambda: 0.0)
    limits = EngineLimits(PlannerLimits(512, 256, 8, target_s), AdapterCacheLimits(1, 1), max_requests=64)
    core = EngineCore(runner, backend, limits)
    for i in range(8):
        prompt, output = (1500, 4) if i else (8, 200)
        core.add(_request(f"r{i}", prompt, output), 0.0)
    now, lengths, ends = 0.0, [], 0
    while core.has_work():
        batch = core.begin_step(now)
        assert batch is not None
        core.submit(batch)
        took = seconds(_prompt_tokens(batch))
        lengths.append(took)
        now += took
        core.end_step(core.wait(), now)
        core.take_outputs()
        ends += len(core.take_ended())
        core.check_invariants()
    assert ends == 8
    assert max(lengths[10:]) == pytest.approx(longest_s, rel=0.05)


def _prompt_tokens(batch: StepBatch) -> int:
    return sum(len(chunk.token_ids) for chunk in batch.chunks if chunk.output_index == 0)


def _request(request_id: str, prompt: int, output: int) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(request_id),
        tenant_id=TenantId(request_id),
        qos_class=QosClass.STANDARD,
        adapter_uid=None,
        prompt_token_ids=tuple(1 + i % 200 for i in range(prompt)),
        max_tokens=output,
        sampling=Sampling(seed=1),
    )
