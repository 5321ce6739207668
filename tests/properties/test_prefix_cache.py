"""The prefix cache: prefix_suite on the real keys and on mutants, eviction, and what one tenant can see of another."""

from __future__ import annotations

import hmac
import random

import pytest
from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_worker.kinds.api import FinishReason
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefix_cache import Namespace, PrefixCache, PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares

from tests.properties import prefix_suite as suite
from tests.properties.prefix_suite import ADAPTERS, BLOCK_SIZE, SECRET, A, B, Run, make_run, request_of, scope_of

NUM_SEEDS = 20
"""Schedules that a mutant has to survive."""
NUM_PROBES = 10_000


class WithoutTenant(PrefixKeys):
    def namespace(self, scope: CacheScope, adapter_uid: AdapterUid | None) -> Namespace:
        return super().namespace(scope_of(A), adapter_uid)


class WithoutAdapter(PrefixKeys):
    def namespace(self, scope: CacheScope, adapter_uid: AdapterUid | None) -> Namespace:
        return super().namespace(scope, None)


class WithoutModel(PrefixKeys):
    def __init__(self, secret: bytes, model_digest: str) -> None:
        super().__init__(secret, "")


class WithoutSecret(PrefixKeys):
    def __init__(self, secret: bytes, model_digest: str) -> None:
        super().__init__(bytes(32), model_digest)


class WithoutParent(PrefixKeys):
    def key(self, namespace: Namespace, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return super().key(namespace, bytes(32), token_ids)


class WithoutTokens(PrefixKeys):
    def key(self, namespace: Namespace, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return super().key(namespace, parent, ())


class WithoutLengths(PrefixKeys):
    """Tenant "a" with adapter "b" and tenant "ab" with none run together."""

    def namespace(self, scope: CacheScope, adapter_uid: AdapterUid | None) -> Namespace:
        return super().namespace(scope._replace(name=f"{scope.name}{adapter_uid or ''}"), None)


class GroupsAreTenants(PrefixKeys):
    """Tenant "a" and group "a" run together."""

    def namespace(self, scope: CacheScope, adapter_uid: AdapterUid | None) -> Namespace:
        return super().namespace(scope._replace(is_group=False), adapter_uid)


MUTANTS = [
    GroupsAreTenants,
    WithoutTenant,
    WithoutAdapter,
    WithoutModel,
    WithoutSecret,
    WithoutParent,
    WithoutTokens,
    WithoutLengths,
]


def test_a_namespace_is_hmac_sha256() -> None:
    rng = random.Random(3)
    for length in (0, 1, 47, 48, 63, 64, 65, 300):
        key, message = rng.randbytes(rng.randint(0, 64)), rng.randbytes(length)
        namespace = Namespace(key)
        assert [namespace.mac(message) for _ in range(2)] == [hmac.digest(key, message, "sha256")] * 2


def one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tenants share one index: what only the keys keep apart then."""

    def find(self: PrefixCache, scope: CacheScope, key: bytes) -> int | None:
        return next((published[key] for published in self._published.values() if key in published), None)

    monkeypatch.setattr(PrefixCache, "find", find)


def test_names_are_those_of_tenant_adapter_model_and_all_tokens() -> None:
    suite.run_names(PrefixKeys, range(60))


@pytest.mark.long
def test_outputs_are_the_same_with_the_cache_and_without() -> None:
    found = evicted = 0
    for seed in range(40):
        without, run = suite.check_outputs(None, seed), suite.check_outputs(PrefixKeys, seed)
        for name, end in run.ends.items():
            if FinishReason.ABORTED not in (end.reason, without.ends[name].reason):
                assert run.tokens[name, 0] == without.tokens[name, 0]
        found += sum(end.cached_prompt_tokens for end in run.ends.values())
        evicted += run.core.stats().evictions
    assert found > 2_000, "the schedules find too little for their outputs to mean much"
    assert evicted > 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_names_notice(mutant: type[PrefixKeys]) -> None:
    with pytest.raises(AssertionError, match=r"two names|one name"):
        suite.run_names(mutant, range(NUM_SEEDS))


@pytest.mark.parametrize("mutant", [WithoutAdapter, WithoutParent, WithoutTokens], ids=lambda m: m.__name__)
def test_the_outputs_alone_notice(mutant: type[PrefixKeys]) -> None:
    with pytest.raises(AssertionError):
        suite.run_outputs(mutant, range(NUM_SEEDS))


@pytest.mark.long
def test_keys_and_index_each_keep_tenants_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    suite.run_outputs(WithoutTenant, range(NUM_SEEDS))  # the index alone
    one_index(monkeypatch)
    suite.run_outputs(PrefixKeys, range(NUM_SEEDS))  # the keys alone
    with pytest.raises(AssertionError):
        suite.run_outputs(WithoutTenant, range(NUM_SEEDS))


def test_a_runner_that_keeps_block_tables_needs_the_new_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted sequence comes back behind a prefix in other blocks than it had."""
    monkeypatch.setattr(Sequence, "holding_id", property(lambda self: self.sequence_id))
    with pytest.raises(AssertionError, match="block table changed"):
        suite.run_outputs(PrefixKeys, range(NUM_SEEDS))


def test_a_block_that_is_written_again_is_not_found_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=32)
    prompt = range(2 * BLOCK_SIZE)
    run.core.add(request_of("r", A, None, prompt, 4, n=2), 0.0)
    run.step()
    run.core.stop_choice(RequestId("r"), 0, 0.0)  # the second choice alone is left, to write the prompt's last token
    pool = run.core._pool
    written = next(s for s in run.core._requests.sequences if not s.is_finished).block_table[1]
    assert pool._cache.is_published(written)
    assert run.core.begin_step(0.0) is not None
    assert not pool._cache.is_published(written)


def test_usage_and_flows_tell_what_was_found() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=32, share=1.0)
    prompt = range(5 * BLOCK_SIZE)
    for name, cached in (("first", 0), ("second", 4 * BLOCK_SIZE)):  # the last token is computed, and so its block
        before = run.computed_by(A)
        run.core.add(request_of(name, A, None, prompt, 3), 0.0)
        run.finish()
        assert run.ends[name].cached_prompt_tokens == cached
        assert run.computed_by(A) - before == len(prompt) - cached
    run.core.add(request_of("longer", A, None, [*prompt, *run.tokens["first", 0][:2], 1, 2, 3], 1), 0.0)
    run.finish()
    assert run.ends["longer"].cached_prompt_tokens == 5 * BLOCK_SIZE
    run.core.add(request_of("choices", A, None, prompt, 2, n=3), 0.0)
    run.finish()
    assert run.ends["choices"].cached_prompt_tokens == 4 * BLOCK_SIZE
    for name, tenant, adapter in (("tenant", B, None), ("adapter", A, ADAPTERS[1])):
        run.core.add(request_of(name, tenant, adapter, prompt), 0.0)
        run.finish()
        assert run.ends[name].cached_prompt_tokens == 0


def test_an_evicted_sequence_finds_its_own_blocks_and_is_not_credited_for_them() -> None:
    computed = []
    for keys in (None, PrefixKeys(SECRET, "m")):
        run = make_run(keys, num_blocks=12, share=1.0)
        for i, tenant in enumerate([A, B]):
            run.core.add(request_of(f"r{i}", tenant, None, range(i, 9 + i), 24), 0.0)
        run.finish()
        assert run.core.stats().evictions == 1
        assert [end.cached_prompt_tokens for end in run.ends.values()] == [0, 0]
        computed.append(run.core.stats().recomputed_tokens)
    without, found = computed
    assert found < without


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=32, share=1.0)
    run.core.add(request_of("turn 1", A, None, range(6), 12), 0.0)
    run.finish()
    run.core.add(request_of("turn 2", A, None, [*range(6), *run.tokens["turn 1", 0], 1, 2], 1), 0.0)
    run.finish()
    assert run.ends["turn 2"].cached_prompt_tokens == 16  # of 6 + 12, the newest has no KV: 17, four full blocks


def test_what_ended_in_an_error_is_not_found_again() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=32, chunk=8, batch_tokens=8)
    run.core.add(request_of("r", A, None, range(20)), 0.0)
    run.step()
    batch = run.core.begin_step(1.0)
    assert batch is not None
    run.core.submit(batch, 1.0)
    run.core.end_step(RuntimeError("the device is gone"), 1.0)
    run.core.take_outputs()
    assert run.core._pool.num_idle == 0
    run.core.add(request_of("again", A, None, range(20)), 0.0)
    run.finish()
    assert run.ends["again"].cached_prompt_tokens == 0


def test_a_prefix_is_evicted_from_its_end_on_and_a_used_one_last() -> None:
    pool = BlockPool(6, 4, max_idle_blocks=6)
    tables = [pool.allocate(A, 3), pool.allocate(A, 3)]
    keys = [[b"1", b"2", b"3"], [b"4", b"5", b"6"]]
    for table, names in zip(tables, keys, strict=True):
        for block_id, key in zip(table, names, strict=True):
            pool.publish(block_id, scope_of(A), key)
        pool.free(A, table)
    pool.take_cached(A, pool.find_cached(scope_of(A), keys[0]))
    pool.free(A, tables[0])
    for left in ((3, 2), (3, 1), (3, 0), (2, 0), (1, 0), (0, 0)):
        pool.allocate(A, 1)
        assert tuple(len(pool.find_cached(scope_of(A), names)) for names in keys) == left


def test_a_tenants_idle_blocks_are_bounded_and_its_own_go_first_above_the_bound() -> None:
    pool = BlockPool(12, 4, max_idle_blocks=4)
    for tenant, count in ((A, 6), (B, 3)):
        table = pool.allocate(tenant, count)
        pool.commit(pool.take_work())  # the step that computed them has cleared them too
        for block_id in table:
            pool.publish(block_id, scope_of(tenant), b"%d" % block_id)
        pool.free(tenant, table)
    assert (pool.idle_of(A), pool.idle_of(B), pool.num_free) == (4, 3, 12)
    pool.allocate(A, 5)  # what was free goes first
    assert (pool.idle_of(A), pool.idle_of(B)) == (4, 3)
    pool.allocate(A, 2)
    assert (pool.idle_of(A), pool.idle_of(B)) == (2, 3)
    pool.allocate(TenantId("c"), 1)  # below its share: the greatest keeper gives
    assert (pool.idle_of(A), pool.idle_of(B)) == (2, 2)
    pool.allocate(A, 3)  # its own two, then another's
    assert (pool.idle_of(A), pool.idle_of(B)) == (0, 1)
    pool.check_invariants()


def test_below_its_share_a_tenant_keeps_its_own_while_another_keeps_more() -> None:
    pool = BlockPool(6, 4, max_idle_blocks=5)
    for tenant, count in ((A, 2), (B, 4)):
        table = pool.allocate(tenant, count)
        for block_id in table:
            pool.publish(block_id, scope_of(tenant), b"%d" % block_id)
        pool.free(tenant, table)
    pool.allocate(A, 1)
    assert (pool.idle_of(A), pool.idle_of(B)) == (2, 3)
    pool.allocate(A, 2)  # two idle, one held, two wanted: just its share
    assert (pool.idle_of(A), pool.idle_of(B)) == (1, 2)  # both keep two then, and it has done so for longer
    pool.check_invariants()


def test_a_block_that_is_only_the_source_of_a_copy_is_not_found() -> None:
    pool = BlockPool(3, 4, max_idle_blocks=3)
    (source,) = pool.allocate(A, 1)
    pool.publish(source, scope_of(A), b"key")
    pool.share(A, [source])
    pool.copy_on_write(source)
    pool.free(A, [source])
    assert pool.find_cached(scope_of(A), [b"key"]) == []
    pool.commit(pool.take_work())
    assert pool.find_cached(scope_of(A), [b"key"]) == [source]
    assert pool.num_idle == 1
    pool.check_invariants()


@pytest.mark.long
def test_a_flood_takes_nothing_from_who_keeps_less() -> None:
    """An attacker cycles prompts through the cache; the victim, who keeps little, finds its prefix every time."""
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64, chunk=32, batch_tokens=32, share=0.25)
    system = [9] * 6 * BLOCK_SIZE
    rng = random.Random(1)
    for i in range(200):
        for j in range(5):
            flood = [rng.randrange(250) for _ in range(7 * BLOCK_SIZE)]
            run.core.add(request_of(f"flood {i} {j}", B, None, flood, 4), 0.0)
            run.finish()
        run.core.add(request_of(f"victim {i}", A, None, [*system, i % 250, i // 250], 4), 0.0)
        run.finish()
        assert run.ends[f"victim {i}"].cached_prompt_tokens == (len(system) if i else 0)


# ---- cache groups


def ask(run: Run, name: str, tenant_id: TenantId, adapter_uid: AdapterUid | None = None, length: int = 17) -> int:
    """Runs a request to its end. Returns the prompt tokens that it found."""
    run.core.add(request_of(name, tenant_id, adapter_uid, range(length), 3), 0.0)
    run.finish()
    return run.ends[name].cached_prompt_tokens


def test_tenants_of_a_group_find_one_anothers_prefixes_and_nobody_else_does() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    outside = TenantId("g")
    for tenant in (A, B):
        run.put_in_group(tenant, "g")
    assert ask(run, "first", A) == 0
    assert ask(run, "second", B) == 16
    assert ask(run, "outside", outside) == 0
    assert ask(run, "again", outside) == 16, "its own"
    before = run.computed_by(B)
    assert ask(run, "third", B) == 16
    assert run.computed_by(B) - before == 1, "what was found is not charged"


def test_a_group_counts_only_for_who_names_it_itself() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    run.put_in_group(A, "b")
    assert ask(run, "first", A) == 0
    assert ask(run, "other", B) == 0, "that a group has its name is nothing that it asked for"
    run.put_in_group(B, "a")
    assert ask(run, "another", B) == 0, "another group"


def test_adapters_are_shared_by_their_content() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    for tenant in (A, B):
        run.put_in_group(tenant, "g")
    assert ask(run, "first", A, ADAPTERS[1]) == 0
    assert ask(run, "same", B, ADAPTERS[1]) == 16
    assert ask(run, "different", B, ADAPTERS[2]) == 0
    assert ask(run, "base", B) == 0


def test_who_leaves_a_group_finds_and_leaves_nothing_there_with_new_requests() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    for tenant in (A, B):
        run.put_in_group(tenant, "g")
    run.core.add(request_of("long", B, None, range(100, 117), 40), 0.0)
    run.step()
    assert ask(run, "first", A) == 0
    run.put_in_group(B, None)
    assert ask(run, "left", B) == 0
    assert ask(run, "its own", B, length=25) == 16
    assert ask(run, "group", A, length=25) == 16, "what b computed after it had left is not there"
    run.finish()


def test_a_request_that_waits_while_its_tenant_leaves_a_group_leaves_nothing_there() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    late = TenantId("late")
    run.put_in_group(A, "g")
    run.core.add(request_of("waits", A, None, range(17), 4), 0.0)
    run.put_in_group(A, None)
    run.finish()
    run.put_in_group(late, "g")
    assert ask(run, "late", late) == 0
    run.put_in_group(A, "g")
    run.core.add(request_of("asks", A, None, range(17), 4), 0.0)
    run.put_in_group(A, None)
    run.finish()
    assert ask(run, "own", A) == 0


def test_what_was_computed_before_a_change_of_groups_is_found_by_nobody() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64)
    late = TenantId("late")
    for tenant in (A, B):
        run.put_in_group(tenant, "g")
    assert ask(run, "first", B) == 0
    run.core.set_share(B, TenantShare(cache_group="g", soft_blocks=60))
    assert ask(run, "as before", A) == 16, "other changes of its policy take nothing away"
    run.core.add(request_of("long", A, None, range(17), 40), 0.0)
    run.step()
    run.put_in_group(B, None)
    run.put_in_group(late, "g")
    assert ask(run, "late", late) == 0, "though a member still has it in its table"
    run.finish()
    assert ask(run, "again", A) == 16, "what a member has computed"
    run.put_in_group(A, None)
    run.put_in_group(late, None)
    pool = run.core._pool
    assert pool.num_idle == 0
    assert pool.num_free == 64


def test_what_one_holds_with_others_counts_for_it_against_its_own_cap() -> None:
    """Both hold the same four blocks, each as if alone; a's end leaves them to b, and then they are idle."""
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64, batch_tokens=64, chunk=64)
    for tenant in (A, B):
        run.put_in_group(tenant, "g")
    run.core.add(request_of("a", A, None, range(17), 3), 0.0)
    run.step()
    run.core.add(request_of("b", B, None, range(17), 20), 0.0)
    run.step()
    held, pool = run.core.blocks_held(), run.core._pool
    assert held == {A: 5, B: 5}
    assert pool.num_held == 6
    while "a" not in run.ends:
        run.step()
    assert A not in run.core.blocks_held()
    assert run.core.blocks_held()[B] >= 5
    run.finish()
    assert run.core.stats().blocks_free == 64


@pytest.mark.long
def test_groups_change_no_output() -> None:
    found = 0
    for seed in range(60):
        run = suite.check_outputs(PrefixKeys, seed, with_groups=True)
        found += bool(run.pairs) and sum(end.cached_prompt_tokens for end in run.ends.values())
    assert found > 2_000


def test_adapters_that_shared_a_groups_cache_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        suite.run_outputs(WithoutAdapter, range(NUM_SEEDS), with_groups=True)


def test_sharing_that_nobody_asked_for_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantShares, "cache_scope", lambda shares, tenant_id: CacheScope("g", is_group=True))
    with pytest.raises(AssertionError, match="is read by"):
        suite.run_outputs(PrefixKeys, range(NUM_SEEDS), with_groups=True)


def test_a_groups_block_that_is_not_cleared_for_others_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "pending_clears", lambda pool: [])
    with pytest.raises(AssertionError, match="crosses tenants uncleared"):
        suite.run_outputs(PrefixKeys, range(NUM_SEEDS), with_groups=True)


def auc(positive: list[int], negative: list[int]) -> float:
    """The chance that a draw of `positive` is below one of `negative`, ties counting half (Mann-Whitney)."""
    counts = [{value: draws.count(value) for value in set(draws)} for draws in (positive, negative)]
    better = sum(n * m * ((p < q) + (p == q) / 2) for p, n in counts[0].items() for q, m in counts[1].items())
    return better / (len(positive) * len(negative))


def probe(run: Run, num_probes: int) -> tuple[list[int], list[int], list[int]]:
    """The victim computes a prompt; the attacker asks for that one and for a random one; then the victim asks again.

    Returns:
        Tokens computed for each: the attacker's probes of the victim's prompts, its random ones, the victim's second.
    """
    rng = random.Random(7)
    foreign: list[int] = []
    control: list[int] = []
    own: list[int] = []

    def cost(tenant_id: TenantId, prompt: list[int]) -> int:
        before, steps = run.computed_by(tenant_id), run.core.stats().steps
        run.core.add(request_of(f"r{len(foreign)} {len(control)} {len(own)}", tenant_id, None, prompt), 0.0)
        while run.core.has_work():
            run.core.step(0.0)
        run.core.take_ended()
        return run.computed_by(tenant_id) - before + (run.core.stats().steps - steps - 1)

    for i in range(num_probes // 2):
        secret, other = ([rng.randrange(259) for _ in range(8 * BLOCK_SIZE)] for _ in range(2))
        cost(A, secret)
        for prompt, costs in random.Random(i).sample([(secret, foreign), (other, control)], 2):
            costs.append(cost(B, prompt))
        own.append(cost(A, secret))
    assert not run.runner.faults
    return foreign, control, own


@pytest.mark.wide
def test_ten_thousand_probes_of_a_foreign_prefix_see_nothing() -> None:
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=64, chunk=64, batch_tokens=64)
    foreign, control, own = probe(run, NUM_PROBES)
    assert len(foreign) + len(control) == NUM_PROBES
    assert set(foreign) == set(control) == {8 * BLOCK_SIZE}
    assert auc(foreign, control) == 0.5
    assert max(own) * 5 <= 8 * BLOCK_SIZE


def test_the_probes_would_see_a_cache_that_tenants_share(monkeypatch: pytest.MonkeyPatch) -> None:
    one_index(monkeypatch)
    run = make_run(WithoutTenant(SECRET, "m"), num_blocks=64, chunk=64, batch_tokens=64)
    run.runner.tenant_of = None
    foreign, control, _ = probe(run, 40)
    assert auc(foreign, control) == 1.0


@pytest.mark.long
def test_what_one_tenant_sees_does_not_depend_on_anothers_tokens() -> None:
    """The same sizes and times, in one world with the attacker's own prompts in the victim's cache, in the other not:
    each step gives the attacker the same tokens, the same counts and the same room, under eviction and preemption."""
    for seed in range(40):
        assert _observe(seed, is_known=True) == _observe(seed, is_known=False)


def _observe(seed: int, *, is_known: bool) -> list[object]:
    rng = random.Random(seed)
    run = make_run(PrefixKeys(SECRET, "m"), num_blocks=rng.randint(14, 24), slots=4, batch_tokens=16)
    blocks = [[rng.randrange(100) for _ in range(BLOCK_SIZE)] for _ in range(4)]
    shift = 0 if is_known else 100
    seen: list[object] = []
    for i in range(60):
        tenant = rng.choice([A, B])
        prompt = [t for _ in range(rng.randint(1, 4)) for t in rng.choice(blocks)] + [3]
        if tenant == A:
            prompt = [t + shift for t in prompt]
        run.core.add(request_of(f"{tenant} {i}", tenant, None, prompt, rng.randint(1, 6), seed=i), 0.0)
        for _ in range(rng.randint(0, 3)):
            run.step()
            mine = {key: list(tokens) for key, tokens in run.tokens.items() if key[0].startswith(B)}
            cached = {name: end.cached_prompt_tokens for name, end in run.ends.items() if name.startswith(B)}
            stats = run.core.stats()
            seen.append((mine, cached, run.computed_by(B), stats.blocks_free, stats.running_sequences))
    assert any(end.cached_prompt_tokens for end in run.ends.values())
    return seen


def test_options_out_of_range_are_refused() -> None:
    keys = PrefixKeys(SECRET, "m")
    for share in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="tenant_share"):
            PrefixOptions(keys, share)
    assert PrefixOptions(keys, 0.001).max_idle_blocks(10) == 1
