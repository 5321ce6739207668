"""A cluster that is played: nothing is lost, and memory that is short is felt."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import find_curve
from manylora.capacity.planning.play import Outcome, play, play_unless_late
from manylora.capacity.planning.shapes import GPUS, SHAPES
from manylora.capacity.planning.traffic import Request, Traffic
from manylora.capacity.planning.worker import WorkerSettings

from tests.capacity.test_plan import traffic

CURVE = find_curve(packaged_curves(), GPUS["H100"], SHAPES["llama-3.1-8b"])


def test_too_late_a_cluster_is_given_up() -> None:
    few = WorkerSettings(slots=2, kv_tokens=100_000, adapter_bytes=1 << 40)
    assert play_unless_late(CURVE, few, 1, traffic(40), 0.5) is None
    assert play_unless_late(CURVE, replace(few, slots=64), 1, traffic(40), 0.5) is not None


def test_adapters_without_room_are_evicted_and_told() -> None:
    seen = traffic(40, rank=64)
    tight = WorkerSettings(slots=32, kv_tokens=100_000, adapter_bytes=9 * 64 * CURVE.shape.rank_bytes)
    roomy = replace(tight, adapter_bytes=40 * 64 * CURVE.shape.rank_bytes)
    few, all_ = play(CURVE, tight, 1, seen), play(CURVE, roomy, 1, seen)
    assert few.evictions > 0 == all_.evictions
    assert few.percentile("ttft_ms", 0.95) > all_.percentile("ttft_ms", 0.95)


@given(
    seed=st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 900), st.integers(1, 90), st.integers(0, 5)),
        min_size=1,
        max_size=60,
    ),
    slots=st.integers(1, 20),
    count=st.integers(1, 3),
    kv_tokens=st.integers(1_000, 5_000),
    adapters=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_in_its_bounds(
    seed: list[tuple[int, int, int, int]], slots: int, count: int, kv_tokens: int, adapters: int
) -> None:
    requests = sorted(
        (
            Request(at / 100, f"t{a % 2}", "standard", f"t{a % 2}/a{a}" if a else "", 16 if a else 0, prompt, output)
            for at, prompt, output, a in seed
        ),
        key=lambda each: each.at_s,
    )
    worker = WorkerSettings(slots, kv_tokens, adapters * 16 * CURVE.shape.rank_bytes)
    outcome: Outcome = play(CURVE, worker, count, Traffic(requests, 5.0))
    assert len(outcome.answers) == len(requests)
    assert outcome.output_tokens == sum(request.output_tokens for request in requests)
    assert outcome.peak_kv_tokens <= kv_tokens
    assert outcome.busy_share <= 1 + 1e-9
    assert outcome.mean_rows <= slots
    least = CURVE.points[0][1] + CURVE.service_ms
    assert min(answer.ttft_ms for answer in outcome.answers) >= least
