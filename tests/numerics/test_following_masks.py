"""Masks that come behind the layers on the device: the CPU's tokens, in graphs and kernel by kernel."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, ModelRunner, Sampling
from manylora_worker.models import loader
from manylora_worker.planning.step_planner import PlannerLimits

from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import make_runner
from tests.numerics.families import VOCAB_SIZE
from tests.properties.odd import END, Odd

pytest.importorskip("triton", reason="the kernels need Triton")

from tests.numerics.interpreter import needs_interpreter
from tests.numerics.test_cuda_runner import make_device_runner, rehearse

pytestmark = pytest.mark.kernels

COUNT = 7
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_p": 0.8, "top_logprobs": 2},
]


def run(
    runner: ModelRunner, *, late: int, constrained: slice, kinds: list[dict[str, Any]] = KINDS, count: int = COUNT
) -> tuple[dict[tuple[str, int], list[int]], int]:
    """By choice what was drawn; and the steps."""
    limits = EngineLimits(PlannerLimits(24, 8, 8), AdapterCacheLimits(1, 1), max_requests=16)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits)
    is_constrained = [False] * len(kinds)
    is_constrained[constrained] = [True] * len(is_constrained[constrained])
    for i, kind in enumerate(kinds):
        core.add(
            EngineRequest(
                RequestId(f"r{i}"), TenantId(f"t{i}"), QosClass.BATCH, None, tuple(range(5, 8 + 3 * i)), count,
                Sampling(seed=i, min_tokens=2, **kind), frozenset([END]), n=1 + (i == 1), bad_sequences=((7,), (9, 4)),
                constraint=Odd(late, vocab_size=VOCAB_SIZE) if is_constrained[i] else None,
            ),
            0.0,
        )  # fmt: skip
    drawn: dict[tuple[str, int], list[int]] = {}
    while core.has_work():
        for output in core.step(0.0):
            drawn.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        core.check_invariants()
    assert core.step_error is None
    return drawn, core.stats().steps


@needs_interpreter
@pytest.mark.slow
def test_in_the_interpreter(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shapes of the graphs."""
    family = family_of("llama")
    expected, _ = run(make_runner(family.loaded), late=0, constrained=slice(0, 2), kinds=KINDS[:2], count=3)
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    _, runner = make_device_runner(family, family.folder, "cpu")
    monkeypatch.setattr(runner, "_capture", True)
    monkeypatch.setattr(runner, "_graph_of", rehearse)
    drawn, _ = run(runner, late=60, constrained=slice(0, 2), kinds=KINDS[:2], count=3)
    assert drawn == expected
    assert runner._draw_graphs


@pytest.mark.gpu
def test_on_the_device(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of("llama")
    expected, _ = run(make_runner(family.loaded), late=0, constrained=slice(None))
    mixed, _ = run(make_runner(family.loaded), late=0, constrained=slice(0, 2))
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    _, runner = make_device_runner(family, family.folder, "cuda")
    in_time, steps = run(runner, late=0, constrained=slice(None))
    assert in_time == expected
    assert steps <= COUNT + 6, "rows take turns"
    late, _ = run(runner, late=60, constrained=slice(None))
    assert late == expected
    beside, _ = run(runner, late=30, constrained=slice(0, 2))
    assert beside == mixed
    assert runner._draw_graphs
