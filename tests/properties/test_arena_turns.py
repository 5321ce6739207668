"""KV and adapters in one arena: bounds hold, a side that is short gets its home, every answer is right and comes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.memory.arena import HOLD_S
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.planning.step_planner import PlannerLimits

BLOCK = 4
KV, HOME, FLOOR, CEILING = 40, 16, 6, 32
TENANTS = [TenantId(name) for name in "abcd"]
SIZES = {AdapterUid(f"{tenant}{number}"): 1 + number % 3 for tenant in TENANTS for number in range(12)}


class ArenaFakeRunner(FakeRunner):
    """A block is a byte. What adapters had is of nobody's KV: used uncleared it is a fault."""

    block_bytes = 1

    def __init__(self, backend: FakeAdapterBackend) -> None:
        super().__init__(num_blocks=KV + HOME, block_size=BLOCK)
        self.num_blocks = KV
        self.adapter_blocks = range(KV, KV + HOME)
        self.of_adapters = list(self.adapter_blocks)
        self._backend = backend

    def give_to_adapters(self, blocks: Sequence[int]) -> None:
        assert not set(blocks) & set(self.of_adapters)
        for block in blocks:
            self._tenants[block] = TenantId("an adapter")
            self._blocks[block][:] = b"\xff" * len(self._blocks[block])
        self.of_adapters += blocks

    def take_from_adapters(self, count: int) -> list[int]:
        coming = [uid for uid, (_, tier) in self._backend._loads.items() if tier.name == "DEVICE"]
        used = sum(SIZES[uid] for uid in (*self._backend.on_device, *coming))
        assert used <= len(self.of_adapters), "adapters have more than there is"
        kept = max(used, len(self.of_adapters) - count)
        taken, self.of_adapters = self.of_adapters[kept:], self.of_adapters[:kept]
        return taken


class Fight:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.backend = FakeAdapterBackend(
            lambda: self.now, size_bytes=lambda uid: SIZES[uid], load_s=lambda uid, tier: 0.02
        )
        self.runner = ArenaFakeRunner(self.backend)
        self.runner.adapters_on_device = lambda: self.backend.on_device
        limits = EngineLimits(
            PlannerLimits(48, 16, 8),
            AdapterCacheLimits(200, HOME, borrow_after_s=5.0, borrow_copy_after_s=0.3),
            max_requests=512,
            arena_bytes=(FLOOR, CEILING),
        )
        prefix = PrefixOptions(PrefixKeys(bytes(32), "m"), 0.5)
        self.core = EngineCore(self.runner, self.backend, limits, prefix)
        self.runner.tenant_of = self.core.tenant_of
        self.requests: dict[RequestId, EngineRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.num_blocks: list[int] = []  # of adapters, step by step

    def add(self, tenant: TenantId, prompt: int, max_tokens: int, adapter: int | None) -> None:
        uid = None if adapter is None else AdapterUid(f"{tenant}{adapter}")
        number = len(self.requests)
        request = EngineRequest(
            RequestId(f"r{number}"),
            tenant,
            QosClass.STANDARD,
            uid,
            tuple((number * 31 + i * 7) % 259 for i in range(prompt)),
            max_tokens,
            Sampling(seed=number),
        )
        self.core.check(request)
        self.core.add(request, self.now)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []

    def step(self) -> None:
        self.now += 0.02
        for output in self.core.step(self.now):
            self.tokens[output.request_id] += output.token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP), output.message
        has, pool = len(self.runner.of_adapters), self.core._pool
        self.num_blocks.append(has)
        assert FLOOR <= has <= CEILING
        assert pool.num_blocks + has == KV + HOME, "a block is lost"
        if len(self.num_blocks) % 10 == 0:
            self.core.check_invariants()
            pool.check_invariants()
            self.core._adapters.check_invariants()
        assert self.core._adapters._device.budget_bytes <= has, "adapters may take more than they have"

    def run_dry(self, most: int = 6000) -> None:
        for _ in range(most):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.request_ids(), "somebody waits for ever"
        for request_id, request in self.requests.items():
            uid = request.adapter_uid
            expected = reference_tokens(request.prompt_token_ids, uid, request.sampling.seed, 0, request.max_tokens)
            assert self.tokens[request_id] == list(expected)

    def kv_heavy(self, count: int) -> None:
        for _ in range(count):
            self.add(self.rng.choice(TENANTS), self.rng.randrange(20, 60), self.rng.randrange(10, 30), None)

    def adapter_heavy(self, count: int) -> None:
        for _ in range(count):
            self.add(
                self.rng.choice(TENANTS), self.rng.randrange(1, 9), self.rng.randrange(1, 12), self.rng.randrange(12)
            )


@pytest.mark.parametrize("seed", range(6))
def test_a_fight_of_kv_and_adapters_ends_with_every_answer(seed: int) -> None:
    fight = Fight(seed)
    for _ in range(6):
        kind = fight.rng.choice(("kv", "adapters", "both"))
        if kind != "adapters":
            fight.kv_heavy(fight.rng.randrange(4, 20))
        if kind != "kv":
            fight.adapter_heavy(fight.rng.randrange(4, 40))
        for _ in range(fight.rng.randrange(20, 300)):
            fight.step()
    fight.run_dry()
    assert len(set(fight.num_blocks)) > 1, "nothing moved"


def test_each_side_takes_what_the_other_leaves_and_gives_it_back() -> None:
    fight = Fight(0)
    fight.adapter_heavy(120)
    fight.run_dry()
    assert max(fight.num_blocks) > HOME + (CEILING - HOME) // 2, "nobody needs KV"
    fight.num_blocks.clear()
    for _ in range(round(HOLD_S / 0.02)):  # adapters idle, and have copies on the host
        fight.step()
    fight.kv_heavy(60)
    fight.run_dry()
    assert min(fight.num_blocks) == FLOOR, "nobody asks for adapters"
    for _ in range(round(HOLD_S / 0.02)):
        fight.step()
    fight.num_blocks.clear()
    fight.adapter_heavy(120)
    fight.kv_heavy(60)
    fight.run_dry()
    assert max(fight.num_blocks) >= HOME, "under pressure from both each has its home"


def test_a_tenants_share_holds_while_the_arena_shrinks() -> None:
    """Whoever has more than its share of what is left gives first."""
    fight = Fight(1)
    for number in range(12):
        fight.add(TENANTS[0], 3, 2, number)
    for number in (0, 3):  # of one block each
        fight.add(TENANTS[1], 3, 2, number)
    fight.run_dry()
    fight.core._adapters.set_device_bytes(8, fight.now)
    held = {tenant: each.device_bytes for tenant, each in fight.core.tenant_adapters().items()}
    assert held[TENANTS[1]] == 2
    assert held[TENANTS[0]] <= 6
