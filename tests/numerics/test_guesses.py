"""Guessed tokens through a real model: greedy and sampled answers, of the base and of adapters, are those without."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.parts import EngineParts
from manylora_worker.planning.step_planner import PlannerLimits

from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf

MAX_TOKENS = 24
Answers = dict[tuple[str, int], list[int]]


def requests(family: Family, uids: Mapping[str | None, AdapterUid | None]) -> list[EngineRequest]:
    found = []
    for i, (adapter, temperature) in enumerate((a, t) for a in list(uids)[:3] for t in (0.0, 0.9)):
        request = EngineRequest(
            request_id=RequestId(f"{adapter}/{temperature}"),
            tenant_id=TenantId("t"),
            qos_class=QosClass.STANDARD,
            adapter_uid=uids[adapter],
            prompt_token_ids=tuple(3 + (7 * i + k) % 50 for k in range(9 + 5 * i)),
            max_tokens=MAX_TOKENS,
            sampling=Sampling(seed=i, temperature=temperature, top_k=20),
            n=2,
        )
        found.append(request)
    return found


def run(settings: WorkerConfig, asked: SequenceOf[EngineRequest], *, speculates: bool) -> tuple[Answers, EngineCore]:
    parts = build_engine(settings)
    try:
        return answers(parts, asked, speculates=speculates)
    finally:
        parts.backend.close()


def answers(parts: EngineParts, asked: SequenceOf[EngineRequest], *, speculates: bool) -> tuple[Answers, EngineCore]:
    limits = EngineLimits(PlannerLimits(48, 17, 16), AdapterCacheLimits(1 << 30, 1 << 20), max_requests=100)
    core = EngineCore(parts.runner, parts.backend, limits)
    core.set_share(TenantId("t"), TenantShare(speculating=frozenset(QosClass) if speculates else frozenset()))
    got: Answers = {}
    for start in range(0, len(asked), 2):  # few at a time: more do not speculate
        for request in asked[start : start + 2]:
            core.add(request, 0.0)
        while core.has_work():
            for output in core.step(0.0):
                got.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
            core.take_ended()
            core.check_invariants()
    assert core.stats().failed_steps == 0
    return got, core


@pytest.mark.parametrize(
    ("name", "device"),
    [("llama", "cpu"), ("llama" + KV_IN_FP8, "cpu"), pytest.param("llama", "cuda", marks=pytest.mark.gpu)],
)
def test_answers_are_those_without(
    family_of: FamilyOf, name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(name)
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    settings = WorkerConfig(
        model=str(family.folder), threads=1, adapter_store=tmp_path, device=device, dtype="float32", num_blocks=200,
        host_kv_mb=0, device_adapter_mb=1, sequence_slots=16, max_batch_tokens=48, kv_cache_dtype=family.kv_cache_dtype,
    )  # fmt: skip
    asked = requests(family, uids)
    plain, without = run(settings, asked, speculates=False)

    def guess(sequence: Sequence, most: int) -> SequenceOf[int] | None:
        if not sequence.group.speculates or sequence.num_pending_tokens:
            return None if sequence.group.speculates else ()
        answer, known = plain[sequence.group.request.request_id, sequence.choice], len(sequence.output_token_ids)
        count = min(most, sequence.max_output_tokens - known - 1, 1 + known % 6)
        wrong = 3 if known % 4 == 1 else 99
        return [token if i != wrong else 3 for i, token in enumerate(answer[known : known + count])]

    monkeypatch.setattr(Sequence, "guess", guess)
    guessed, core = run(settings, asked, speculates=True)
    assert guessed == plain
    stats = core.stats()
    assert stats.guessed_tokens > stats.right_guesses > 100
    # On a GPU steps go ahead of a draw that no guess waits for.
    assert stats.steps < without.stats().steps * (0.6 if device == "cpu" else 0.75)
    for request in asked:
        if request.sampling.is_greedy:
            adapter = next(name for name, uid in uids.items() if uid == request.adapter_uid)
            expected = family.reference.greedy(list(request.prompt_token_ids), adapter, MAX_TOKENS)
            assert guessed[request.request_id, 0] == expected
