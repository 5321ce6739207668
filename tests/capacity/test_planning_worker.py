"""One worker that is played, step by step."""

from __future__ import annotations

import pytest
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import find_curve
from manylora.capacity.planning.shapes import GPUS, SHAPES
from manylora.capacity.planning.traffic import Request
from manylora.capacity.planning.worker import Running, Worker, WorkerSettings

CURVE = find_curve(packaged_curves(), GPUS["H200"], SHAPES["llama-3.1-8b"])
ADAPTER_BYTES = 16 * CURVE.shape.rank_bytes


def worker_of(*, slots: int = 4, adapters: int = 4) -> Worker:
    return Worker(CURVE, WorkerSettings(slots, 10_000, adapters * ADAPTER_BYTES), lambda adapter, is_there: None)


def request(prompt: int, output: int, adapter: str = "") -> Running:
    return Running(Request(0.0, "t", "standard", adapter, 16 if adapter else 0, prompt, output))


def run(worker: Worker, requests: list[Running]) -> list[float]:
    """Until all have ended. The steps' milliseconds."""
    for running in requests:
        worker.add(running, 0.0)
    now, steps = 0.0, []
    while (seconds := worker.begin(now, now)) is not None:
        now += seconds
        steps.append(seconds * 1e3)
        worker.end(now)
    return steps


def test_a_prompt_comes_in_chunks_and_then_a_token_a_step() -> None:
    worker, running = worker_of(), request(600, 20)
    steps = run(worker, [running])
    assert len(steps) == 3 + 19
    assert steps[0] == pytest.approx(CURVE.step_ms(0, 0, prompt_tokens=256))
    assert steps[3] == pytest.approx(CURVE.step_ms(1, 601))
    assert running.first_at == pytest.approx(sum(steps[:3]) / 1e3)
    assert running.ended_at == pytest.approx(sum(steps) / 1e3)
    assert worker.open == 0


def test_more_sequences_than_slots_take_turns_of_a_quantum() -> None:
    worker, both = worker_of(slots=1), [request(8, 40), request(8, 40)]
    run(worker, both)
    assert worker.steps == 2 * 40
    assert both[1].first_at < both[0].ended_at < both[1].ended_at


def test_what_came_after_the_step_was_submitted_waits_for_the_next() -> None:
    worker, late = worker_of(), request(8, 4)
    worker.add(late, 1.0)
    assert worker.begin(1.0, 0.5) is None
    assert worker.begin(1.0, 1.0) is not None


def test_an_adapter_is_loaded_once_and_the_least_recent_makes_room() -> None:
    gone: list[str] = []
    settings = WorkerSettings(4, 10_000, 2 * ADAPTER_BYTES)
    worker = Worker(CURVE, settings, lambda adapter, is_there: None if is_there else gone.append(adapter))
    now = 0.0
    for name in ("a", "b", "a", "c"):
        worker.add(request(8, 1, name), now)
        now = max(now, worker.next_ready() or 0.0)
        seconds = worker.begin(now, now)
        assert seconds is not None
        now += seconds
        worker.end(now)
    assert (worker.loads, worker.file_loads, worker.evictions, gone) == (3, 3, 1, ["b"])
    assert now > 3 * 84 / CURVE.load_host_mb_s


def test_a_state_takes_its_part_of_the_kv() -> None:
    """Room for one of two sequences: the second waits until the first has ended."""
    curve = find_curve(packaged_curves(), GPUS["H100"], SHAPES["qwen3.5-9b"])
    state_tokens = curve.shape.state_tokens
    assert state_tokens > 1000
    worker = Worker(curve, WorkerSettings(4, 2 * state_tokens + 47, 0), lambda adapter, is_there: None)
    both = [request(8, 16), request(8, 16)]
    run(worker, both)
    assert worker.peak_kv == state_tokens + 24
    assert both[0].ended_at < both[1].first_at
