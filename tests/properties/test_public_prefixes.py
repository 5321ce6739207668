"""Public prefixes: whatever tenants do they are there, and what they are changes no text and nobody's account."""

from __future__ import annotations

import logging
import random
import tracemalloc

import pytest
from manylora_shared.errors import Overloaded
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import reference_tokens
from manylora_worker.kinds.api import EngineRequest, FinishReason
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory import public_prefixes
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.public_prefixes import MAX_ATTEMPTS, PUBLIC, PublicPrefixes
from manylora_worker.memory.tenant_shares import TenantShare

from tests.properties.prefix_suite import (
    ADAPTERS,
    BLOCK_SIZE,
    SECRET,
    TENANTS,
    A,
    B,
    Run,
    check_texts,
    make_run,
    request_of,
)

SYSTEM = tuple(range(100, 100 + 6 * BLOCK_SIZE))


def public_run(num_blocks: int = 64, *, share: float = 0.25, public_share: float = 0.5, **options: int) -> Run:
    return make_run(
        PrefixKeys(SECRET, "m"),
        num_blocks=num_blocks,
        share=share,
        public_share=public_share,
        max_context_tokens=8 * BLOCK_SIZE,
        **options,
    )


def ask(run: Run, name: str, tenant_id: TenantId, prompt: tuple[int, ...], max_tokens: int = 1) -> int:
    """Runs one request. Returns how many of its prompt's tokens were found."""
    run.core.add(request_of(name, tenant_id, None, prompt, max_tokens), 0.0)
    run.finish()
    want = reference_tokens(prompt, None, 0, 0, max_tokens)
    assert run.tokens[name, 0] == want
    return run.ends[name].cached_prompt_tokens


def test_every_tenant_finds_it_at_once_and_nobody_is_charged() -> None:
    run = public_run()
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    assert run.core.has_work()
    run.finish()
    assert (run.core.stats().public_blocks, run.core.stats().public_blocks_declared) == (6, 6)
    assert (run.tokens, run.ends, dict(run.core.flows()), run.core.blocks_held()) == ({}, {}, {}, {})
    for name, tenant_id in (("a", A), ("b", B), ("a again", A)):
        before = run.computed_by(tenant_id)
        assert ask(run, name, tenant_id, (*SYSTEM, 1, 2)) == len(SYSTEM)
        assert run.computed_by(tenant_id) - before == 2
    assert ask(run, "a part", B, (*SYSTEM[:9], 1)) == 2 * BLOCK_SIZE
    assert ask(run, "it alone", B, SYSTEM) == 5 * BLOCK_SIZE  # the last token is always computed


def test_adapters_do_not_find_it() -> None:
    run = public_run()
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.finish()
    run.core.add(request_of("r", A, ADAPTERS[1], (*SYSTEM, 1)), 0.0)
    run.finish()
    assert run.ends["r"].cached_prompt_tokens == 0
    assert run.tokens["r", 0] == reference_tokens((*SYSTEM, 1), ADAPTERS[1], 0, 0, 1)


def test_a_tenants_own_blocks_are_found_behind_it() -> None:
    run = public_run(share=1.0)
    prompt = (*SYSTEM, *range(5))
    assert ask(run, "before", A, prompt) == 0
    run.core.set_public_prefixes({"system": SYSTEM[: 2 * BLOCK_SIZE]}, 0.0)
    run.finish()
    assert ask(run, "again", A, prompt) == len(SYSTEM) + BLOCK_SIZE
    assert ask(run, "other", B, prompt) == 2 * BLOCK_SIZE


def test_a_flood_does_not_take_it() -> None:
    """It is held, used or not."""
    run = public_run(32)
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.finish()
    for i in range(60):
        flood = tuple(random.Random(i).randrange(90) for _ in range(7 * BLOCK_SIZE))
        run.core.add(request_of(f"flood {i}", B, None, flood, 3), 0.0)
    run.finish()
    assert run.core.stats().public_blocks == 6
    assert ask(run, "victim", A, (*SYSTEM, 1)) == len(SYSTEM)


def test_what_is_held_of_it_does_not_count_against_a_hard_cap() -> None:
    run = public_run()
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.finish()
    run.core.set_share(A, TenantShare(dict.fromkeys(QosClass, 1), hard_blocks=7))
    most = 0
    for i in range(3):
        run.core.add(request_of(f"r{i}", A, None, (*SYSTEM, i), 3), 0.0)
    while run.core.has_work():
        run.step()
        most = max(most, run.core.blocks_held_by(A))
    assert most == 3  # one each beside the public ones, all at once
    assert all(end.cached_prompt_tokens == len(SYSTEM) for end in run.ends.values())


def test_withdrawn_it_is_found_no_more_and_who_has_it_goes_on() -> None:
    run = public_run()
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.finish()
    request = request_of("r", A, None, (*SYSTEM, 1), 6)
    run.core.add(request, 0.0)
    run.step()
    run.core.set_public_prefixes({}, 0.0)
    assert run.core.stats().public_blocks == 0
    run.core.check_invariants()
    run.finish()
    assert run.tokens["r", 0] == reference_tokens(request.prompt_token_ids, None, 0, 0, 6)
    assert ask(run, "later", B, (*SYSTEM, 1)) == 0


def test_what_is_declared_again_is_not_computed_again() -> None:
    run = public_run()
    run.core.set_public_prefixes({"one": SYSTEM, "other": (*SYSTEM[:8], 1, 2, 3, 4)}, 0.0)
    run.finish()
    assert run.core.stats().public_blocks == 7
    steps = run.core.stats().steps
    run.core.set_public_prefixes({"one": SYSTEM[:12]}, 0.0)
    assert not run.core.has_work()
    assert (run.core.stats().public_blocks, run.core.stats().steps) == (3, steps)


def test_declared_anew_in_mid_computing() -> None:
    run = public_run(chunk=BLOCK_SIZE, batch_tokens=8)
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.step()
    run.step()
    other = (*SYSTEM[:8], *range(8))
    run.core.set_public_prefixes({"other": other}, 0.0)
    run.finish()
    assert run.core.stats().public_blocks == 4
    assert ask(run, "r", A, (*other, 1)) == len(other)


def test_the_engines_own_request_takes_no_place() -> None:
    run = public_run(chunk=4, batch_tokens=8)
    run.core._max_requests = 1
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.step()
    assert run.core.stats().requests == 1
    run.core.add(request_of("r", A, None, (1, 2)), 0.0)
    with pytest.raises(Overloaded, match="has 1 requests"):
        run.core.add(request_of("more", A, None, (1, 2)), 0.0)
    run.finish()
    assert run.core._public.num_requests == 0


def test_it_leaves_room_for_the_longest_request(caplog: pytest.LogCaptureFixture) -> None:
    """Of 12 blocks 8 are a full context: 4 are left, whatever the share."""
    run = public_run(12, public_share=1.0)
    with caplog.at_level(logging.WARNING):
        run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    assert [record.message for record in caplog.records] == ["there is no room to keep all of a public prefix"]
    run.finish()
    assert run.core.stats().public_blocks == 4
    assert ask(run, "longest", A, tuple(range(20)), 11) == 0
    assert ask(run, "behind", A, (*SYSTEM, 1), 7) == 4 * BLOCK_SIZE


def test_a_long_prefix_takes_memory_by_its_length() -> None:
    """Each beginning of it was kept as a key: a prefix of 100,000 tokens took gigabytes to declare."""
    pool = BlockPool(4096, BLOCK_SIZE, 1)
    public = PublicPrefixes(pool, 4096, 1 << 13)
    tracemalloc.start()
    try:
        public.declare({"long": range(1 << 13)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert public.num_declared_blocks == (1 << 13) // BLOCK_SIZE
    assert peak < 8 << 20


def test_options_out_of_range_are_refused() -> None:
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="public_share"):
            PrefixOptions(PrefixKeys(SECRET, "m"), 0.5, share)


def fail_step(run: Run) -> None:
    batch = run.core.begin_step(1.0)
    assert batch is not None
    run.core.submit(batch)
    run.core.end_step(RuntimeError("the device is gone"), 1.0)


def test_what_a_failed_step_computed_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    run = public_run(chunk=8, batch_tokens=8)
    run.core.set_public_prefixes({"part": SYSTEM[:8], "system": SYSTEM}, 0.0)
    for _ in range(2):
        run.step()
    assert run.core.stats().public_blocks == 4
    fail_step(run)
    assert run.core.stats().public_blocks == 2, "those of its own alone are in doubt"
    run.finish()
    assert run.core.stats().public_blocks == 6
    run.core.set_public_prefixes({}, 0.0)
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    for _ in range(MAX_ATTEMPTS):
        assert run.core.has_work()
        fail_step(run)
    assert not run.core.has_work()
    assert (run.core.stats().public_blocks, run.core.stats().public_blocks_declared) == (0, 6)
    assert "a public prefix cannot be computed" in caplog.text
    assert run.core.take_outputs() == []
    assert run.core.take_ended() == []


def test_a_tenants_failed_step_takes_nothing_public() -> None:
    run = public_run()
    run.core.set_public_prefixes({"system": SYSTEM}, 0.0)
    run.finish()
    run.core.add(request_of("r", A, None, (*SYSTEM, 1)), 0.0)
    fail_step(run)
    (output,) = run.core.take_outputs()
    assert output.finish_reason is FinishReason.ERROR
    run.core.take_ended()
    assert ask(run, "again", A, (*SYSTEM, 1)) == len(SYSTEM)


def check_random(seed: int) -> int:
    """A random schedule in a small pool, prefixes declared and withdrawn meanwhile: every text is the reference's.
    Returns how many tokens were found."""
    rng = random.Random(seed)
    run = public_run(
        rng.randint(14, 34),
        slots=rng.randint(2, 6),
        batch_tokens=rng.randint(6, 24),
        chunk=rng.randint(2, 16),
        share=rng.choice([0.1, 0.5, 1.0]),
        num_host_blocks=rng.choice([0, 40]),
    )
    first, second, third = (tuple(rng.randrange(250) for _ in range(BLOCK_SIZE)) for _ in range(3))
    stems = [(first, second, third), (first, third, second, second), (second, first)]
    prefixes = {f"p{i}": tuple(t for block in stem for t in block) for i, stem in enumerate(stems)}
    requests: dict[str, EngineRequest] = {}
    for i in range(40):
        if rng.random() < 0.2:
            declared = rng.sample(sorted(prefixes), rng.randint(0, 3))
            run.core.set_public_prefixes({name: prefixes[name] for name in declared}, 0.0)
        stem = rng.choice(stems)
        prompt = [t for block in stem[: rng.randint(0, 4)] for t in block] + [7] * rng.randint(0, BLOCK_SIZE)
        tenant_id, adapter_uid = rng.choice(TENANTS), rng.choice([*ADAPTERS, None, None, None])
        request = request_of(
            f"r{i}", tenant_id, adapter_uid, prompt or [1], rng.randint(1, 10), n=rng.choice([1, 1, 2]), seed=i % 3
        )
        requests[request.request_id] = request
        run.core.add(request, 0.0)
        for _ in range(rng.choice([0, 1, 5])):
            run.step()
        if rng.random() < 0.1:
            run.core.abort(RequestId(f"r{rng.randint(0, i)}"), 0.0)
    run.finish()
    check_texts(run, requests, seed)
    run.core.set_public_prefixes({}, 0.0)
    run.finish()
    assert run.core.stats().blocks_free == run.core.stats().blocks_total
    return sum(end.cached_prompt_tokens for end in run.ends.values())


def check_randoms(num_seeds: int) -> int:
    return sum(check_random(seed) for seed in range(num_seeds))


def test_outputs_are_the_references_whatever_is_declared() -> None:
    assert check_randoms(60) > 3_000


def for_adapters_too(self: PublicPrefixes, sequence: Sequence, num_blocks: int) -> list[int]:
    return self._walk(sequence.tokens(0, num_blocks * BLOCK_SIZE))


def without_parent(self: PublicPrefixes, token_ids: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for start in range(0, len(token_ids), BLOCK_SIZE):
        wanted = token_ids[start : start + BLOCK_SIZE]
        block_id = next((b for (_, tokens), b in self._children.items() if tokens == wanted), None)
        if block_id is None:
            break
        found.append(block_id)
    return found


def one_block_early(self: PublicPrefixes, sequence: Sequence, start: int, end: int) -> None:
    publish(self, sequence, start, end + BLOCK_SIZE)


publish = PublicPrefixes.publish


@pytest.mark.parametrize(
    ("name", "mutant"), [("find", for_adapters_too), ("_walk", without_parent), ("publish", one_block_early)]
)
def test_the_random_schedules_notice(name: str, mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_prefixes.PublicPrefixes, name, mutant)
    with pytest.raises(AssertionError):
        check_randoms(20)


def test_what_one_tenant_sees_does_not_depend_on_who_else_uses_it() -> None:
    """In one world the other tenant's prompts begin with the prefix, in the other with another one as long, that is as
    public: each request finds as much, and each step gives as much."""
    seen: list[list[object]] = []
    other = tuple(range(200, 200 + len(SYSTEM)))
    for begins_with in (SYSTEM, other):
        run = public_run()
        run.core.set_public_prefixes({"system": SYSTEM, "other": other}, 0.0)
        run.finish()
        rng = random.Random(5)
        world: list[object] = []
        for i in range(200):
            tenant_id = rng.choice([A, B])
            start = SYSTEM if tenant_id == A else begins_with
            run.core.add(request_of(f"{tenant_id} {i}", tenant_id, None, (*start, i), rng.randint(1, 5)), 0.0)
            for _ in range(rng.randint(0, 3)):
                run.step()
                mine = {key: list(tokens) for key, tokens in run.tokens.items() if key[0].startswith(A)}
                found = {name: end.cached_prompt_tokens for name, end in run.ends.items() if name.startswith(A)}
                world.append((mine, found, run.computed_by(A), run.core.stats().blocks_free))
        seen.append(world)
    assert seen[0] == seen[1]


def test_blocks_of_it_are_cleared_for_the_next_owner() -> None:
    run = public_run(12, public_share=0.4)
    run.core.set_public_prefixes({"system": SYSTEM[:16]}, 0.0)
    run.finish()
    blocks = run.core._public.blocks
    assert all(run.core._pool.owner_of(block_id) == PUBLIC for block_id in blocks)
    run.core.set_public_prefixes({}, 0.0)
    cleared: set[int] = set()
    for i in range(2):
        run.core.add(request_of(f"r{i}", A, None, tuple(range(i, 24 + i)), 1), 0.0)
    while run.core.has_work():
        batch = run.core.begin_step(1.0)
        assert batch is not None
        cleared.update(batch.clear_blocks)
        run.core.submit(batch)
        run.core.end_step(run.core.wait(), 1.0)
    assert blocks <= cleared
