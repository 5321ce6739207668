"""Three tenants fight for a third of the KV that they need, against transformers + peft: parked sequences, swapped ones
and those that are computed again all answer as if each had been alone."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, FinishReason, SwapRunner
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.layers.host_kv import TensorHostKv, runs
from manylora_worker.models.layers.kv_cache import MIB
from manylora_worker.planning.step_planner import PlannerLimits

from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.driver import COMPOSITIONS, GREEDY, composed, make_runner, put_adapter
from tests.numerics.families import VOCAB_SIZE

A, B, C = TENANTS = TenantId("a"), TenantId("b"), TenantId("c")
MAX_TOKENS = 40
HARD, SOFT, RESERVE = 20, 12, 8
"""Blocks, of NUM_BLOCKS."""
NUM_BLOCKS = 36


@dataclass(frozen=True)
class Asked:
    adapter: str | None
    prompt: list[int]
    tokens: list[int]
    """The reference's answer."""


def asked(family: Family, count: int, block_size: int) -> list[Asked]:
    """What the tenants ask for in turns. A sequence of theirs takes up to some 10 blocks, and all wait at once."""
    rng = random.Random(block_size)
    names = [None, *list(family.adapters)[:3], "three"]
    family.reference.compose("three", COMPOSITIONS["three"])
    found = []
    for i in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 6 * block_size))]
        name = names[i % len(names)]
        found.append(Asked(name, prompt, family.reference.greedy(prompt, name, MAX_TOKENS)))
    need = sum(-(-(len(each.prompt) + MAX_TOKENS) // block_size) for each in found)
    assert need >= 3 * NUM_BLOCKS
    return found


def fight(family: Family, core: EngineCore, requests: list[Asked], uids: dict[str | None, AdapterUid | None]) -> None:
    """All are asked at once; the answers are the reference's, and each of the three fates has befallen somebody."""
    keys = {**uids, **composed(family.reference, uids)}
    core.set_share(A, TenantShare(soft_blocks=SOFT, hard_blocks=HARD))
    core.set_share(B, TenantShare(soft_blocks=SOFT, reserve_blocks=RESERVE))
    for i, each in enumerate(requests):
        core.add(
            EngineRequest(
                RequestId(str(i)), TENANTS[i % 3], QosClass.STANDARD, keys[each.adapter], tuple(each.prompt),
                MAX_TOKENS, GREEDY, n=1 + (i % 6 == 5),
            ),
            0.0,
        )  # fmt: skip
    got: dict[tuple[str, int], list[int]] = {}
    deadline = time.monotonic() + 240
    while core.has_work():
        assert time.monotonic() < deadline
        for output in core.step(0.0):  # times stand still, so computing again is never known to be cheaper
            assert output.finish_reason is not FinishReason.ERROR, output.message
            got.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        core.take_ended()
        core.check_invariants()
        assert core.blocks_held_by(A) <= HARD
    for i, each in enumerate(requests):
        for choice in range(1 + (i % 6 == 5)):
            assert got[str(i), choice] == each.tokens, (i, choice)
    stats = core.stats()
    assert min(stats.preemptions, stats.swaps_out, stats.evictions) > 0, "not all of it happened"
    assert stats.swaps_in == stats.swaps_out
    assert stats.failed_steps == 0
    assert (stats.blocks_free, stats.host_blocks_free) == (stats.blocks_total, stats.host_blocks_total)


@pytest.mark.parametrize(
    ("name", "cache_share"),
    [
        ("llama", 0.5),
        ("llama" + KV_IN_FP8, 0.5),
        *[pytest.param(*each, marks=pytest.mark.wide) for each in [("llama", 0.0), ("gemma2", 0.0), ("gemma2", 0.5)]],
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("qwen3_5_text", 0.0), ("granite4_h", 0.0), ("gemma4_text", 0.5)]
        ],
        *[pytest.param(each + KV_IN_FP8, 0.0, marks=pytest.mark.slow) for each in ("qwen3_5_text", "gemma4_text")],
    ],
)
def test_outputs_are_the_references(family_of: FamilyOf, name: str, cache_share: float) -> None:
    family = family_of(name)
    runner = make_runner(family.loaded, num_blocks=NUM_BLOCKS, block_size=8, num_host_blocks=20)
    assert isinstance(runner, SwapRunner)
    uids: dict[str | None, AdapterUid | None] = {None: None}
    for adapter, folder in family.adapters.items():
        uids[adapter] = put_adapter(runner, family.loaded, folder)
    limits = EngineLimits(PlannerLimits(32, 9, 6), AdapterCacheLimits(64, 64), max_requests=64)
    prefix = PrefixOptions(PrefixKeys(bytes(32), "model"), cache_share) if cache_share else None
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits, prefix)
    fight(family, core, asked(family, 18, 8), uids)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
def test_outputs_are_the_references_on_the_device(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    """Copies on a stream of their own, beside steps that are begun one ahead."""
    family = family_of(name)
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    adapter_bytes = 8 << 20
    block_bytes = family.loaded.spec.kv.token_bytes(torch.float32) * 16
    settings = WorkerConfig(
        model=str(family.folder), adapter_store=tmp_path, device="cuda", dtype="float32",
        num_blocks=NUM_BLOCKS, threads=1,
        device_adapter_mb=adapter_bytes / MIB, sequence_slots=10, max_batch_tokens=48,
        host_kv_mb=10 * block_bytes / MIB,
    )  # fmt: skip
    parts = build_engine(settings)
    assert isinstance(parts.runner, SwapRunner)
    assert parts.runner.host_kv.num_blocks == 10
    assert 0 < parts.runner.host_kv.block_copy_s < 1e-2
    limits = EngineLimits(
        PlannerLimits(48, 17, 10), AdapterCacheLimits(host_bytes=1 << 30, device_bytes=adapter_bytes), max_requests=64
    )
    core = EngineCore(parts.runner, parts.backend, limits)
    try:
        fight(family, core, asked(family, 30, 16), uids)
    finally:
        parts.backend.close()


# ---- the copies


def test_stretches_of_blocks_are_copied_at_once() -> None:
    assert list(runs([4, 5, 6, 9, 10, 3], [0, 1, 2, 3, 7, 8])) == [(4, 0, 3), (9, 3, 1), (10, 7, 1), (3, 8, 1)]
    assert list(runs([], [])) == []


def check_copies(device: str) -> None:
    """Blocks go out, are overwritten, and come back elsewhere, whoever had the host blocks before."""
    arena = torch.arange(12 * 40, dtype=torch.float32, device=device).view(12, 40).clone()
    host = TensorHostKv(arena, 8)
    before = arena.clone()
    rng = random.Random(1)
    for _ in range(20):
        count = rng.randint(1, 6)
        blocks, elsewhere = rng.sample(range(12), count), rng.sample(range(12), count)
        host_blocks = rng.sample(range(8), count)
        host.copy_out(blocks, host_blocks).wait()
        arena[blocks] = -1.0
        copy = host.copy_in(host_blocks, elsewhere)
        copy.wait()
        assert copy.is_over()
        assert copy.seconds >= 0
        assert torch.equal(arena[elsewhere], before[blocks])
        arena.copy_(before)
    assert host.block_copy_s > 0


def test_copies() -> None:
    check_copies("cpu")


@pytest.mark.gpu
def test_copies_on_the_device() -> None:
    check_copies("cuda")
    check_copies("cuda")  # what the first one pinned is free again


@pytest.mark.gpu
def test_a_copy_comes_behind_the_steps_before_it_and_those_after_it_go_on() -> None:
    """The arena is written by work that is still to be done when the copy is started, and read by more behind it."""
    arena = torch.zeros(64, 1 << 19, device="cuda")
    host = TensorHostKv(arena, 64)
    blocks = list(range(0, 64, 2))
    slow = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(30):
        slow = (slow @ slow) * 1e-4
    arena.fill_(7.0)
    started = time.perf_counter()
    copy = host.copy_out(blocks, list(range(32)))
    host_s = time.perf_counter() - started
    assert not copy.is_over()
    behind = torch.cuda.Event()
    (slow @ slow).sum()
    behind.record()
    copy.wait()
    arena.zero_()
    host.copy_in(list(range(32)), [block + 1 for block in blocks]).wait()
    assert bool((arena[1::2] == 7.0).all())
    assert bool((arena[::2] == 0.0).all())
    gib_s = 32 * arena[0].nbytes / copy.seconds / 2**30
    print(
        f"copied out at {gib_s:.1f} GiB/s; a block of 2 MiB, out and in: {host.block_copy_s * 1e6:.0f} us; "
        f"to start a copy: {host_s / 32 * 1e6:.0f} us a block"
    )
    assert gib_s > 5
