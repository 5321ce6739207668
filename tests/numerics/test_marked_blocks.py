"""With free blocks marked (NaN, --debug-fill-freed), what reads a freed block fails.

That answers are else what they are without: test_worker_against_peft.py, and of the kernels test_cuda_runner.py.
"""

from __future__ import annotations

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.weights.source import read_adapter

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner


def make_marking_runner(family: Family, *, num_blocks: int = 96) -> TorchModelRunner:
    runner = make_runner(family.loaded, num_blocks=num_blocks)
    cache = KvCache(
        family.loaded.spec.kv,
        num_blocks=num_blocks,
        block_size=4,
        dtype=family.loaded.dtype,
        device=family.loaded.device,
        marks_free=True,
    )
    return TorchModelRunner(family.loaded, trusted_weights(family.loaded), cache, runner._planner)


def test_blocks_are_marked_until_they_are_entered() -> None:
    geometry = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=2)
    cache = KvCache(
        geometry, num_blocks=4, block_size=2, dtype=torch.bfloat16, device=torch.device("cpu"), marks_free=True
    )
    content = cache.flat.view(4, -1)
    assert content.isnan().all()
    cache.zero_blocks(torch.tensor([1, 2]))
    cache.clear_blocks(torch.tensor([2]))
    assert [bool(row.isnan().all()) for row in content] == [True, False, True, True]
    assert (content[1] == 0).all()


def run_with_a_block_freed_too_early(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, *, marks_free: bool
) -> dict[str, RequestEnd]:
    """Two requests; the first block of the one that is "wronged" goes back to the pool while it decodes."""
    family = family_of("llama")
    runner = make_marking_runner(family) if marks_free else make_runner(family.loaded)
    limits = EngineLimits(PlannerLimits(32, 32, 4), AdapterCacheLimits(1, 1), max_requests=4)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits, clears_freed=marks_free)
    for name in ("wronged", "other"):
        core.add(
            EngineRequest(
                RequestId(name), TenantId(name), QosClass.STANDARD, None, (5, 6, 7, 8, 9), 12,
                Sampling(seed=0, temperature=0.0),
            ),
            0.0,
        )  # fmt: skip
    for _ in range(3):
        core.step(0.0)
    (wronged,) = core._requests[RequestId("wronged")].sequences
    core._pool.free(wronged.tenant_id, wronged.block_table[:1])
    with monkeypatch.context() as patch:
        for refuses in ("free", "unpublish"):  # a block that is not held
            patch.setattr(BlockPool, refuses, lambda *_: None)
        while core.has_work():
            core.step(0.0)
    return {end.request_id: end for end in core.take_ended()}


def test_a_block_freed_too_early_fails_the_request_that_reads_it(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_with_a_block_freed_too_early(family_of, monkeypatch, marks_free=True)
    assert ended["wronged"].reason is FinishReason.ERROR
    assert "not finite" in ended["wronged"].message
    assert ended["other"].reason is FinishReason.STOP
    ended = run_with_a_block_freed_too_early(family_of, monkeypatch, marks_free=False)
    assert ended["wronged"].reason is FinishReason.STOP, "without, nobody would know"


def test_an_adapter_dropped_too_early_fails_who_reads_it(family_of: FamilyOf) -> None:
    family = family_of("llama")
    runner = make_marking_runner(family)
    adapter = read_adapter(family.adapters["all-linear"], family.loaded.adapter_base(), LIMITS)
    runner.fill_adapter(adapter)
    driver = Driver(runner)
    streams = [Stream([5, 6, 7], adapter.uid), Stream([5, 6, 7])]
    driver.run(streams, 2)
    stale = runner.adapters[adapter.uid]
    runner.drop_adapter(adapter.uid)
    runner.adapters[adapter.uid] = stale
    logits = driver.logits(streams)
    assert logits[0].isnan().any()
    assert logits[1].isfinite().all()
    runner.fill_adapter(adapter)  # the host tier's copy is as it was
    fresh = Stream([5, 6, 7], adapter.uid)
    driver.run([fresh], 2)
    assert fresh.output == streams[0].output[:2]
