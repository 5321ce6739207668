"""Log-probabilities of prompts' tokens against transformers + peft, however the prompts are cut and cached."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import NOT_FINITE, EngineRequest, Logprobs, Sampled, Sampling, SequenceChunk
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.models.layers.prompt_scores import ScoredRows, answers, score
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.planning.step_planner import PlannerLimits

from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.driver import make_runner, put_adapter
from tests.numerics.families import EACH_FAMILY, VOCAB_SIZE

TOP = 3
TOLERANCE = 1e-4
MAX_TOKENS = 12
Asked = Sequence[tuple[str | None, list[int], int]]  # adapter, prompt, choices


def chunk(sequence_id: int, start: int, length: int, scored: range, prompt: list[int], top: int) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=sequence_id,
        token_ids=prompt[start : start + length],
        start_position=start,
        block_table=(),
        adapter_uid=None,
        samples=start + length == len(prompt),
        sampling=Sampling(prompt_logprobs=top),
        choice=0,
        output_index=0,
        prompt_token_ids=prompt,
        output_token_ids=(),
        scored=scored,
    )


def test_slices_are_the_whole_and_each_chunk_gets_its_own() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 30)
    first, second = list(range(3, 9)), list(range(10, 16))
    # rows 2..5 are positions 1..4 of the first, row 6 is no chunk's of these, rows 7..11 positions 0..4 of the second
    chunks = [
        chunk(7, 1, 4, range(2, 5), first, 1),
        chunk(8, 5, 1, range(0), first, 1),
        chunk(9, 0, 6, range(0, 5), second, 4),
    ]
    rows = ScoredRows.of(chunks, [5, 6, 11].__getitem__)
    assert rows is not None
    assert (rows.rows, rows.targets) == ([3, 4, 5, 6, 7, 8, 9, 10], [6, 7, 8, 11, 12, 13, 14, 15])
    index, targets = torch.tensor(rows.rows), torch.tensor(rows.targets)
    found = [score(lambda some: logits[some], index, targets, rows.top, size) for size in (1, 3, 8, 64)]
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(each, found[0], strict=True))
    drawn = [Sampled(8, 20), Sampled(9, 21)]
    told = answers(chunks, drawn, rows, found[0])
    assert [(each.sequence_id, each.token_id, len(each.scored)) for each in told] == [(7, 0, 3), (8, 20, 0), (9, 21, 5)]
    expected = torch.log_softmax(logits, -1)
    for each, row, target in zip([*told[0].scored, *told[2].scored], rows.rows, rows.targets, strict=True):
        assert each.logprob == pytest.approx(float(expected[row, target]), abs=1e-6)
        assert each.rank == 1 + int((logits[row] > logits[row, target]).sum())
    assert {len(each.top) for each in told[0].scored} == {1}
    assert {len(each.top) for each in told[2].scored} == {4}
    assert told[2].scored[0].top[0][0] == int(logits[6].argmax())


def test_what_is_not_finite_is_an_error_of_its_chunk_alone() -> None:
    logits = torch.zeros(6, 5)
    logits[1, 2] = float("nan")
    chunks = [chunk(1, 0, 3, range(0, 2), [1, 2, 3], 0), chunk(2, 0, 3, range(0, 2), [1, 2, 3], 0)]
    rows = ScoredRows.of(chunks, [2, 5].__getitem__)
    assert rows is not None
    scores = score(lambda some: logits[some], torch.tensor(rows.rows), torch.tensor(rows.targets), 0, 4)
    told = answers(chunks, [Sampled(1, 4), Sampled(2, 4)], rows, scores)
    assert [each.error for each in told] == [NOT_FINITE, None]


def test_nothing_is_scored_where_nobody_asks() -> None:
    chunks = [chunk(1, 0, 3, range(0), [1, 2, 3], 0)]
    assert ScoredRows.of(chunks, [2].__getitem__) is None
    assert answers(chunks, [Sampled(1, 4)], None, ()) == [Sampled(1, 4)]


def serve(family: Family, runner: TorchModelRunner, asked: Asked) -> tuple[list[list[Logprobs]], EngineCore]:
    """All at once, with a prefix cache, in chunks; every third asks for no prompt's log-probabilities."""
    uids = {name: put_adapter(runner, family.loaded, folder) for name, folder in family.adapters.items()}
    limits = EngineLimits(PlannerLimits(24, 9, 4), AdapterCacheLimits(64, 64), max_requests=64)
    prefix = PrefixOptions(PrefixKeys(bytes(32), family.loaded.spec.digest), 1.0)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits, prefix)
    for i, (name, prompt, n) in enumerate(asked):
        uid = None if name is None else uids[name]
        sampling = Sampling(seed=0, temperature=0.0, prompt_logprobs=TOP if i % 3 else None)
        request = EngineRequest(
            RequestId(str(i)), TenantId(f"t{i % 2}"), QosClass.BATCH, uid, tuple(prompt), MAX_TOKENS, sampling, n=n
        )
        core.add(request, 0.0)
    scored: list[list[Logprobs]] = [[] for _ in asked]
    tokens: dict[tuple[str, int], list[int]] = {}
    while core.has_work():
        for output in core.step(0.0):
            assert not output.message
            scored[int(output.request_id)] += output.prompt_logprobs
            tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        for end in core.take_ended():
            is_scored = int(end.request_id) % 3 > 0
            assert not (is_scored and end.cached_prompt_tokens), "a cached position has no logits"
            assert end.prompt_tokens == len(asked[int(end.request_id)][1])
        core.check_invariants()
    for (request_id, choice), got in tokens.items():
        name, prompt, _ = asked[int(request_id)]
        assert got == family.reference.greedy(prompt, name, MAX_TOKENS), (request_id, choice)
    return scored, core


@pytest.mark.parametrize("name", [*EACH_FAMILY, "llama" + KV_IN_FP8])
def test_they_are_the_references(family_of: FamilyOf, name: str) -> None:
    """Prompts that begin alike, of every adapter, in chunks, evicted in their middle, some cached for others."""
    family = family_of(name)
    rng = random.Random(name)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(28)]
    asked = [
        (adapter, [*stem[: rng.choice([1, 8, 17, 28])], rng.randrange(3, VOCAB_SIZE)], rng.choice([1, 1, 2]))
        for _ in range(4)
        for adapter in (None, *list(family.adapters)[:2])
    ]
    scored, core = serve(family, make_runner(family.loaded, num_blocks=22, block_size=4), asked)
    assert core.stats().evictions > 0
    for i, ((adapter, prompt, _), told) in enumerate(zip(asked, scored, strict=True)):
        if not i % 3:
            assert told == []
            continue
        assert len(told) == len(prompt) - 1
        expected = torch.log_softmax(family.reference.logits(prompt, adapter)[:-1], -1)
        for row, token_id, found in zip(expected, prompt[1:], told, strict=True):
            assert found.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            assert dict(found.top) == pytest.approx({each: float(row[each]) for each, _ in found.top}, abs=TOLERANCE)
            assert [each for each, _ in found.top] == sorted(dict(found.top), key=lambda each: -dict(found.top)[each])
            assert abs(found.rank - 1 - int((row > row[token_id]).sum())) <= 1


def test_as_transformers_wrote_it(family_of: FamilyOf) -> None:
    """A model that is not read as a decoder: all its logits come at once."""
    family = family_of("llama")
    runner = make_runner(family.loaded)
    runner._decoder = None
    prompt = [5, 9, 4, 77, 12, 30, 8, 6, 6, 41, 17]
    [_, told], _ = serve(family, runner, [(None, [3], 1), (None, prompt, 1)])
    expected = torch.log_softmax(family.reference.logits(prompt, None)[:-1], -1)
    assert [each.logprob for each in told] == pytest.approx(
        [float(row[token_id]) for row, token_id in zip(expected, prompt[1:], strict=True)], abs=TOLERANCE
    )
