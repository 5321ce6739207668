"""What a prefix cache must hold, as checks that take the class of its keys: run on the real one, and on mutants of it.

`check_names` looks at the keys alone. `check_outputs` runs random schedules through the whole engine over FakeRunner,
with the cache and without: every text is the reference's, whatever is found.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import GroupTimes, SequenceGroup
from manylora_worker.kinds.sequence import Sequence as EngineSequence
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.step_planner import PlannerLimits

SECRET = bytes(range(32))
A, B = TenantId("a"), TenantId("b")
TENANTS = [A, B, TenantId("ab")]
ADAPTERS = [None, AdapterUid("u"), AdapterUid("b"), AdapterUid("uu")]
GROUPS = [None, "a", "g"]
BLOCK_SIZE = 4


def request_of(
    name: str,
    tenant_id: TenantId,
    adapter_uid: AdapterUid | None,
    prompt: Sequence[int],
    max_tokens: int = 1,
    *,
    n: int = 1,
    seed: int = 0,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        tenant_id=tenant_id,
        qos_class=QosClass.STANDARD,
        adapter_uid=adapter_uid,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(seed=seed),
        n=n,
    )


def scope_of(tenant_id: TenantId, group: str | None = None) -> CacheScope:
    return CacheScope(tenant_id, is_group=False) if group is None else CacheScope(group, is_group=True)


def keys_of(keys: PrefixKeys, request: EngineRequest, group: str | None = None) -> list[bytes]:
    """The keys of the prompt's full blocks."""
    scope = scope_of(request.tenant_id, group)
    sequence = EngineSequence(0, SequenceGroup(request, scope, 1, GroupTimes(0.0)), 0, request.max_tokens)
    num_blocks = len(request.prompt_token_ids) // BLOCK_SIZE
    return [keys.key_at(sequence, index, BLOCK_SIZE) for index in range(num_blocks)]


def check_names(of_class: type[PrefixKeys], seed: int) -> None:
    """Two blocks have one key if and only if secret, model, group or tenant, adapter and all tokens up to their end
    agree."""
    rng = random.Random(seed)
    blocks = [tuple(rng.randrange(2) for _ in range(BLOCK_SIZE)) for _ in range(3)]
    keys = [of_class(secret, model) for secret in (SECRET, SECRET[::-1]) for model in ("m", "mu")]
    seen: dict[bytes, tuple[object, ...]] = {}
    names: dict[tuple[object, ...], bytes] = {}
    whose = itertools.product(enumerate(keys), TENANTS, GROUPS, ADAPTERS)
    for (i, each), tenant_id, group, adapter_uid in whose:
        for _ in range(3):
            prompt = [t for _ in range(rng.randint(1, 4)) for t in rng.choice(blocks)]
            for index, key in enumerate(keys_of(each, request_of("r", tenant_id, adapter_uid, prompt), group)):
                name = (i, group or "", "" if group else tenant_id, adapter_uid, *prompt[: (index + 1) * BLOCK_SIZE])
                assert seen.setdefault(key, name) == name, "two names have one key"
                assert names.setdefault(name, key) == key, "one name has two keys"


@dataclass
class Run:
    """An engine over the fake, and all that came out of it."""

    core: EngineCore
    runner: FakeRunner
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    steps: int = 0
    members: dict[str, dict[TenantId, None]] = field(default_factory=dict)  # by group, whoever has ever been in it
    pairs: dict[tuple[TenantId, TenantId], None] = field(default_factory=dict)
    """Tenants that have been in one group, each at some time: what one left there, the other may find."""

    def put_in_group(self, tenant_id: TenantId, group: str | None) -> None:
        if group is not None:
            others = self.members.setdefault(group, {})
            others[tenant_id] = None
            self.pairs |= dict.fromkeys([(tenant_id, other) for other in others])
            self.pairs |= dict.fromkeys([(other, tenant_id) for other in others])
        self.core.set_share(tenant_id, TenantShare(cache_group=group))

    def step(self) -> None:
        self.steps += 1
        for output in self.core.step(float(self.steps)):
            assert output.finish_reason is not FinishReason.ERROR, output.message
            self.tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        for end in self.core.take_ended():
            self.ends[end.request_id] = end
        assert not self.runner.faults, self.runner.faults
        self.core.check_invariants()

    def finish(self) -> None:
        for _ in range(5000):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("some request does not end")

    def computed_by(self, tenant_id: TenantId) -> int:
        """Prompt tokens that were computed for the tenant so far."""
        return sum(tokens.prompt_tokens for flow, tokens in self.core.flows().items() if flow[0] == tenant_id)


def make_run(
    keys: PrefixKeys | None,
    *,
    num_blocks: int,
    slots: int = 6,
    batch_tokens: int = 24,
    chunk: int = 8,
    share: float = 0.5,
    max_context_tokens: int = 4096,
    num_host_blocks: int = 0,
) -> Run:
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_context_tokens=max_context_tokens,
        num_host_blocks=num_host_blocks,
        block_copy_s=1e-9,
    )
    backend = FakeAdapterBackend(lambda: 0.0)
    limits = EngineLimits(PlannerLimits(batch_tokens, chunk, slots), AdapterCacheLimits(8, 8), max_requests=10_000)
    core = EngineCore(runner, backend, limits, None if keys is None else PrefixOptions(keys, share))
    runner.tenant_of = core.tenant_of
    runner.adapters_on_device = lambda: backend.on_device
    run = Run(core, runner)
    runner.shares = lambda reader, writer: (reader, writer) in run.pairs
    return run


def check_outputs(of_class: type[PrefixKeys] | None, seed: int, *, with_groups: bool = False) -> Run:
    """A random schedule in a pool that is too small: shared prefixes, tenants, adapters, choices, aborts; and tenants
    that join cache groups and leave them."""
    rng = random.Random(seed)
    keys = None if of_class is None else of_class(SECRET, "m")
    run = make_run(
        keys,
        num_blocks=rng.randint(12, 30),
        slots=rng.randint(2, 6),
        batch_tokens=rng.randint(6, 24),
        chunk=rng.randint(2, 16),
        share=rng.choice([0.1, 0.5, 1.0]),
    )
    first, second, third = (tuple(rng.randrange(250) for _ in range(BLOCK_SIZE)) for _ in range(3))
    stems = [(first, second, third, third, first), (first, third, second, second), (second, first, third)]
    requests: dict[str, EngineRequest] = {}
    for i in range(40):
        stem = rng.choice(stems)
        prompt = [t for block in stem[: rng.randint(0, 5)] for t in block] + [7] * rng.randint(0, BLOCK_SIZE)
        tenant_id, adapter_uid = rng.choice([*TENANTS, A, A, A]), rng.choice([*ADAPTERS, None, None, None])
        max_tokens, n = rng.randint(1, 16), rng.choice([1, 1, 1, 2])
        if with_groups and i % 4 == 0:
            run.put_in_group(rng.choice(TENANTS), rng.choice([*GROUPS, "g"]))
        request = request_of(f"r{i}", tenant_id, adapter_uid, prompt or [1], max_tokens, n=n, seed=i % 3)
        requests[request.request_id] = request
        run.core.add(request, 0.0)
        for _ in range(rng.choice([0, 1, 5])):
            run.step()
        if rng.random() < 0.1:
            run.core.abort(RequestId(f"r{rng.randint(0, i)}"), 0.0)
    run.finish()
    check_texts(run, requests, seed)
    assert run.core.stats().blocks_free == run.core.stats().blocks_total
    return run


def check_texts(run: Run, requests: Mapping[str, EngineRequest], seed: int) -> None:
    """Every text is the reference's; that of an aborted request as far as it goes."""
    for name, request in requests.items():
        for choice in range(request.n):
            want = reference_tokens(
                request.prompt_token_ids, request.adapter_uid, request.sampling.seed, choice, request.max_tokens
            )
            got = run.tokens.get((name, choice), [])
            assert got == want[: len(got)], f"{name} of seed {seed} has another text"
            assert len(got) == len(want) or run.ends[name].reason is FinishReason.ABORTED


def run_names(of_class: type[PrefixKeys], seeds: range) -> None:
    for seed in seeds:
        check_names(of_class, seed)


def run_outputs(of_class: type[PrefixKeys], seeds: range, *, with_groups: bool = False) -> None:
    for seed in seeds:
        check_outputs(of_class, seed, with_groups=with_groups)
