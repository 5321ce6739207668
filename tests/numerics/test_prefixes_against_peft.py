"""The engine with the prefix cache against transformers + peft: what is found is what would have been computed."""

from __future__ import annotations

import random

import pytest
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.counters import EngineStats
from manylora_worker.kinds.api import EngineRequest, FinishReason
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.memory.prefix_cache import Namespace, PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.step_planner import PlannerLimits

from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.driver import GREEDY, make_runner, put_adapter
from tests.numerics.families import VOCAB_SIZE

MAX_TOKENS = 6


class WithoutAdapter(PrefixKeys):
    def namespace(self, scope: CacheScope, adapter_uid: AdapterUid | None) -> Namespace:
        return super().namespace(scope, None)


def asked(family: Family, seed: int) -> list[tuple[str | None, list[int], int]]:
    """(adapter, prompt, choices): prompts of every adapter that begin alike, in blocks of 4."""
    rng = random.Random(seed)
    names = [None, *list(family.adapters)[:2]]
    stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(28)] for _ in range(2)]
    requests: list[tuple[str | None, list[int], int]] = []
    for _ in range(24):
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(0, 6))]
        prompt = rng.choice(stems)[: rng.choice([8, 16, 17, 28])] + tail
        requests.append((rng.choice(names), prompt, rng.choice([1, 1, 2])))
    return requests


def serve(
    family: Family,
    requests: list[tuple[str | None, list[int], int]],
    keys: PrefixKeys | None,
    group: str | None = None,
) -> tuple[list[list[int]], int, EngineStats]:
    """Of two tenants, in a cache group or not: each request's tokens (all choices are alike), tokens found in the
    cache, and the engine's counters."""
    runner = make_runner(family.loaded, num_blocks=22, block_size=4)
    uids = {name: put_adapter(runner, family.loaded, folder) for name, folder in family.adapters.items()}
    limits = EngineLimits(PlannerLimits(24, 9, 4), AdapterCacheLimits(64, 64), max_requests=64)
    prefix = None if keys is None else PrefixOptions(keys, 1.0)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits, prefix)
    for tenant in ("t0", "t1"):
        core.set_share(TenantId(tenant), TenantShare(cache_group=group))
    for i, (name, prompt, n) in enumerate(requests):
        uid = None if name is None else uids[name]
        tenant, request_id = TenantId(f"t{i % 2}"), RequestId(str(i))
        core.add(EngineRequest(request_id, tenant, QosClass.BATCH, uid, tuple(prompt), MAX_TOKENS, GREEDY, n=n), 0.0)
    tokens: dict[tuple[str, int], list[int]] = {}
    num_cached = 0
    while core.has_work():
        for output in core.step(0.0):
            assert output.finish_reason is not FinishReason.ERROR, output.message
            tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        num_cached += sum(end.cached_prompt_tokens for end in core.take_ended())
        core.check_invariants()
    for (request_id, choice), got in tokens.items():
        assert got == tokens[request_id, 0], f"choice {choice} of {request_id} is another text"
    return [tokens[str(i), 0] for i in range(len(requests))], num_cached, core.stats()


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "llama" + KV_IN_FP8, pytest.param("gemma4_text", marks=pytest.mark.slow)]
)
def test_the_cache_changes_no_token(family_of: FamilyOf, name: str) -> None:
    family = family_of(name)
    requests = asked(family, seed=3)
    expected = [family.reference.greedy(prompt, adapter, MAX_TOKENS) for adapter, prompt, _ in requests]
    without, num_cached, _ = serve(family, requests, None)
    assert without == expected
    assert num_cached == 0
    found, num_cached, stats = serve(family, requests, PrefixKeys(bytes(32), family.loaded.spec.digest))
    assert found == expected
    assert num_cached > 50
    assert stats.preemptions > 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_group_changes_no_token(family_of: FamilyOf, name: str) -> None:
    family = family_of(name)
    requests = asked(family, seed=3)
    expected = [family.reference.greedy(prompt, adapter, MAX_TOKENS) for adapter, prompt, _ in requests]
    keys = PrefixKeys(bytes(32), family.loaded.spec.digest)
    found, num_cached, _ = serve(family, requests, keys, group="friends")
    assert found == expected
    _, apart, _ = serve(family, requests, keys)
    assert num_cached > apart


def test_adapters_that_shared_a_cache_would_be_noticed(family_of: FamilyOf) -> None:
    family = family_of("llama")
    requests = asked(family, seed=3)
    expected = [family.reference.greedy(prompt, adapter, MAX_TOKENS) for adapter, prompt, _ in requests]
    found, _, _ = serve(family, requests, WithoutAdapter(bytes(32), "model"))
    assert found != expected
