"""An engine whose adapter goes into the weights and out: its texts stay right, and no prefix of before is found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import AheadFakeRunner, FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.merge_turns import Merging
from manylora_worker.kinds.api import AdapterTier, EngineRequest, ModelRunner, Sampling
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.planning.step_planner import PlannerLimits

ONE, TWO, BAD = AdapterUid("1" * 64), AdapterUid("2" * 64), AdapterUid("3" * 64)
TENANT = TenantId("t")
PROMPT = tuple(range(40))


class Rig:
    def __init__(self, runner_type: type[FakeRunner] = FakeRunner, *, load_s: float = 0.0) -> None:
        self.now, self._ids = 0.0, iter(range(1 << 20))
        self.backend = FakeAdapterBackend(
            lambda: self.now,
            load_s=lambda uid, tier: load_s,
            error_of=lambda uid, tier: "its file is torn" if uid == BAD and tier is AdapterTier.HOST else None,
        )
        self.runner = runner_type(num_blocks=32, block_size=4, adapters_on_device=lambda: self.backend.on_device)
        limits = EngineLimits(PlannerLimits(48, 16, 4), AdapterCacheLimits(2, 2), max_requests=64)
        prefix = PrefixOptions(PrefixKeys(bytes(32), "m"), 0.5)
        self.core = EngineCore(self.runner, self.backend, limits, prefix)
        self.runner.tenant_of = self.core.tenant_of
        self.told: list[str] = []

    def work(self) -> dict[RequestId, list[int]]:
        found: dict[RequestId, list[int]] = {}
        while self.core.has_work():
            self.now += 0.01
            for output in self.core.step(self.now):
                found.setdefault(output.request_id, []).extend(output.token_ids)
            self.core.check_invariants()
            assert self.core.step_error is None
        assert not self.runner.faults
        return found

    def request(self, uid: AdapterUid | None, prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
        number = next(self._ids)
        name = RequestId(f"r{number}")
        return EngineRequest(name, TENANT, QosClass.STANDARD, uid, prompt, 6, Sampling(seed=number))

    def ask(self, *uids: AdapterUid | None, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        """Their answers are right. How much of each prompt the cache had."""
        requests = [self.request(uid, prompt) for uid in uids]
        for request in requests:
            self.core.add(request, self.now)
        found = self.work()
        for request in requests:
            want = reference_tokens(prompt, request.adapter_uid, request.sampling.seed, 0, 6)
            assert found[request.request_id] == want
        ends = {end.request_id: end.cached_prompt_tokens for end in self.core.take_ended()}
        return [ends[request.request_id] for request in requests]

    def set_merged(self, uid: AdapterUid | None) -> str:
        self.core.set_merged(uid, TENANT, self.told.append, self.now)
        self.work()
        return self.told.pop()


@pytest.mark.parametrize("runner_type", [FakeRunner, AheadFakeRunner])
def test_texts_stay_right_and_prefixes_are_not_mixed(runner_type: type[FakeRunner]) -> None:
    rig = Rig(runner_type)
    assert rig.ask(ONE) == [0]
    assert rig.ask(ONE) == [36]
    assert rig.set_merged(ONE) == ""
    assert rig.ask(ONE) == [0], "what was computed beside the weights"
    assert rig.ask(ONE) == [36]
    with pytest.raises(AssertionError, match="another adapter"):
        rig.core.add(rig.request(TWO), rig.now)
    assert rig.set_merged(TWO) == ""
    assert rig.ask(TWO, TWO) == [0, 0]
    assert rig.set_merged(None) == ""
    assert rig.ask(ONE, TWO, None) == [0, 0, 0]
    assert rig.set_merged(None) == ""


def test_one_that_cannot_be_merged_leaves_the_base() -> None:
    rig = Rig()
    rig.runner.unmergeable = [TWO]
    assert rig.set_merged(ONE) == ""
    assert rig.set_merged(BAD) == "its file is torn"
    assert rig.ask(ONE, None, TWO) == [0, 0, 0]
    assert rig.set_merged(TWO) == "it is unmergeable"
    assert rig.ask(ONE, None, TWO) == [0, 0, 0]
    rig.runner.merge_problem = "these weights are quantized"
    assert rig.set_merged(ONE) == rig.core.merge_problem == "these weights are quantized"
    rig.core._merging = Merging(ModelRunner, rig.core._adapters)  # type: ignore[arg-type]  # one that cannot at all
    assert "--tensor-parallel" in rig.set_merged(ONE)


def test_what_nobody_foresaw_leaves_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, left = Rig(), [2]
    merge_some = rig.runner.merge_some

    def fail(uid: AdapterUid) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("a bug")
        return merge_some(uid)

    monkeypatch.setattr(rig.runner, "merge_some", fail)
    assert rig.set_merged(ONE) == "KeyError: 'a bug'"
    assert rig.ask(ONE, None, TWO) == [0, 0, 0]


def test_adapters_stand_still_while_another_is_merged() -> None:
    """What a load makes of the base model's weights would be made of others."""
    rig = Rig(load_s=0.05)
    rig.core.set_pins({TENANT: [Pin("two", TWO)]}, 1)
    assert rig.set_merged(ONE) == ""
    before = dict(rig.backend.on_device)
    assert ONE in before
    rig.core.set_pins({TENANT: [Pin("one", ONE), Pin("two", TWO)]}, 1)
    rig.core.prefetch(TWO, TENANT)
    rig.ask(ONE, ONE)
    assert rig.backend.on_device == before
    assert rig.set_merged(None) == ""
    rig.work()
    assert {ONE, TWO} <= rig.backend.on_device.keys()


@settings(deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_order_of_merges_and_requests(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(rng.choice([FakeRunner, AheadFakeRunner]), load_s=rng.choice([0.0, 0.03]))
    rig.runner.unmergeable = [TWO] if rng.random() < 0.3 else []
    merged: AdapterUid | None = None
    for _ in range(rng.randint(2, 8)):
        if rng.random() < 0.5:
            wanted = rng.choice([None, ONE, TWO, BAD])
            problem = rig.set_merged(wanted)
            assert bool(problem) == (wanted == BAD or wanted in rig.runner.unmergeable)
            merged = None if problem else wanted
        else:
            uids = [merged or rng.choice([None, ONE, TWO]) for _ in range(rng.randint(1, 5))]
            rig.ask(*uids, prompt=PROMPT[: rng.randint(1, 40)])
