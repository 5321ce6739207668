"""The sampler: the right distributions, independent of the batch, with transformers' processors as oracle of cuts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_worker.kinds.api import ANY_TOKEN, Sampling, SequenceChunk
from manylora_worker.models.torch.sampler import _draw, _exponential_noise, _penalized, _row_key, _thresholds, sample
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 400


def chunk(sampling: Sampling, *, index: int = 0, choice: int = 0, prompt: Any = (), output: Any = ()) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=index * 100 + choice, token_ids=[1], start_position=0, block_table=[0], adapter_uid=None,
        samples=True, sampling=sampling, choice=choice, output_index=index, prompt_token_ids=prompt,
        output_token_ids=output,
    )  # fmt: skip


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SAMPLINGS = [
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.0),
    Sampling(seed=3, temperature=0.3, top_k=7),
    Sampling(seed=4, temperature=2.0, top_p=0.6),
    Sampling(seed=5, min_p=0.2, top_logprobs=3),
    Sampling(seed=6, temperature=1.3, top_k=50, top_p=0.8, min_p=0.01),
    Sampling(seed=2**64 - 1, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    Sampling(seed=8, temperature=0.0, logit_bias={3: 100.0}, top_logprobs=0),
    Sampling(seed=9, temperature=1e-6, top_p=0.01),
    Sampling(seed=10, allowed_token_ids=(2, 9, 30), logit_bias={9: -1.0}, repetition_penalty=1.3),
]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = random.Random(0)
    logits = random_logits(len(SAMPLINGS))
    chunks = [
        chunk(s, index=i, prompt=[rng.randrange(VOCAB) for _ in range(9)], output=[rng.randrange(VOCAB)] * i)
        for i, s in enumerate(SAMPLINGS)
    ]
    alone = [sample(logits[i : i + 1], [c])[0] for i, c in enumerate(chunks)]
    assert sample(logits, chunks) == alone
    order = list(range(len(chunks)))
    for _ in range(5):
        rng.shuffle(order)
        some = order[: rng.randint(1, len(order))]
        assert sample(logits[some], [chunks[i] for i in some]) == [alone[i] for i in some]


def test_logits_are_not_changed() -> None:
    logits = random_logits(len(SAMPLINGS))
    before = logits.clone()
    sample(logits, [chunk(s, output=[3, 3, 4]) for s in SAMPLINGS])
    assert torch.equal(logits, before)


def test_greedy_is_argmax() -> None:
    logits = random_logits(64)
    drawn = sample(logits, [chunk(Sampling(seed=i, temperature=0.0)) for i in range(64)])
    assert [s.token_id for s in drawn] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("keyed_by", ["seed", "index", "choice"])
def test_draws_follow_the_distribution(options: dict[str, Any], keyed_by: str) -> None:
    """Chi-square over 20,000 draws that differ in one part of the key only; the bound is far out in the tail."""
    vocab, draws = 12, 20_000
    logits = random_logits(1, vocab, seed=3, scale=1.0)
    sampling = Sampling(seed=77, **options)
    cut = _thresholds((logits - logits.max()) / sampling.temperature, [sampling])
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities = scaled.masked_fill(scaled < (cut if cut is not None else -1e9), float("-inf")).softmax(-1)[0]
    chunks = [
        chunk(
            replace(sampling, seed=i) if keyed_by == "seed" else sampling,
            index=i if keyed_by == "index" else 5,
            choice=i if keyed_by == "choice" else 0,
        )
        for i in range(draws)
    ]
    tokens = _draw(logits.expand(draws, -1), logits.max().expand(draws, 1), chunks)
    counts = tokens.bincount(minlength=vocab).double()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept].double() * draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 12


def test_noise_is_keyed_and_uncorrelated() -> None:
    device = torch.device("cpu")
    keys = [_row_key(seed, choice, index) for seed in range(4) for choice in range(2) for index in range(4)]
    assert len(set(keys)) == len(keys)
    noise = _exponential_noise(keys, 20_000, device)
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    assert noise.mean().item() == pytest.approx(1.0, abs=0.01)
    assert noise.var().item() == pytest.approx(1.0, abs=0.05)
    correlation = torch.corrcoef(noise) - torch.eye(len(keys))
    assert correlation.abs().max() < 0.04
    shifted = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1]
    assert shifted.abs() < 0.04


def test_noise_is_pinned() -> None:
    """A resumed request must draw what it would have drawn: these values must never change."""
    noise = _exponential_noise([_row_key(1, 0, 0), _row_key(2**64 - 1, 3, 1000)], 3, torch.device("cpu"))
    expected = torch.tensor(PINNED)
    torch.testing.assert_close(noise, expected, atol=1e-6, rtol=1e-6)


PINNED = [[0.6437097, 2.8193519, 2.331167], [0.929701, 1.4212674, 1.9854219]]


@pytest.mark.parametrize("top_k", [1, 2, 30, VOCAB, 10_000])
def test_top_k_as_in_transformers(top_k: int) -> None:
    logits = random_logits(8)
    assert_same_cut(logits, Sampling(seed=0, top_k=top_k), TopKLogitsWarper(top_k))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_as_in_transformers(top_p: float) -> None:
    assert_same_cut(random_logits(8), Sampling(seed=0, top_p=top_p), TopPLogitsWarper(top_p))
    assert_same_cut(random_logits(8, scale=0.1), Sampling(seed=0, top_p=top_p), TopPLogitsWarper(top_p))


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_as_in_transformers(min_p: float) -> None:
    assert_same_cut(random_logits(8), Sampling(seed=0, min_p=min_p), MinPLogitsWarper(min_p))


def test_cuts_combine_in_transformers_order() -> None:
    sampling = Sampling(seed=0, temperature=1.7, top_k=20, top_p=0.8, min_p=0.05)
    assert_same_cut(
        random_logits(16), sampling,
        TemperatureLogitsWarper(1.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05),
    )  # fmt: skip


def assert_same_cut(logits: torch.Tensor, sampling: Sampling, *warpers: Any) -> None:
    expected = logits.clone()
    for warper in warpers:
        expected = warper(None, expected)
    shifted = (logits - logits.max(-1, keepdim=True).values) / sampling.temperature
    cut = _thresholds(shifted, [sampling] * len(logits))
    kept = shifted >= cut if cut is not None else torch.ones_like(shifted, dtype=torch.bool)
    assert torch.equal(kept, expected > float("-inf"))


def test_repetition_penalty_as_in_transformers() -> None:
    logits = random_logits(3)
    prompt, output = [5, 9, 9, 30], [7, 5]
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output] * 3), logits.clone())
    chunks = [chunk(Sampling(seed=0, repetition_penalty=1.4), prompt=prompt, output=output) for _ in range(3)]
    assert torch.equal(_penalized(logits, chunks), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = random_logits(2)
    sampling = Sampling(seed=0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={8: -1.0, 11: 2.0})
    scores = _penalized(logits, [chunk(sampling, prompt=[4, 8], output=[7, 7, 8]), chunk(Sampling(seed=0))])
    expected = logits.clone()
    expected[0, 7] -= 0.5 + 2 * 0.25
    expected[0, 8] -= 0.5 + 0.25 + 1.0
    expected[0, 11] += 2.0
    torch.testing.assert_close(scores, expected)


def test_no_other_than_allowed_tokens_are_drawn() -> None:
    logits = random_logits(2)
    sampling = Sampling(seed=0, allowed_token_ids=(4, 7), logit_bias={7: 1.5, 9: 50.0})
    scores = _penalized(logits, [chunk(sampling), chunk(Sampling(seed=0))])
    expected = logits.clone()
    expected[0] = float("-inf")
    expected[0, 4], expected[0, 7] = logits[0, 4], logits[0, 7] + 1.5
    torch.testing.assert_close(scores, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1), st.sampled_from(SAMPLINGS))
def test_bars_are_as_if_the_model_gave_these_tokens_nothing(seed: int, barred: set[int], sampling: Sampling) -> None:
    logits = random_logits(3, seed=seed % 1000)
    bars = [(token_id, ANY_TOKEN) for token_id in [*barred, *list(barred)[:5]]]
    rows = [chunk(replace(sampling, seed=seed + i), index=i, output=[1, 2]) for i in range(3)]
    without = logits.clone()
    without[:, list(barred)] = float("-inf")
    drawn = sample(logits, [replace(row, bars=bars) for row in rows])
    assert [s.token_id for s in drawn] == [s.token_id for s in sample(without, rows)]
    assert not {s.token_id for s in drawn} & barred
    own = logits.log_softmax(-1)
    assert all(s.logprobs is None or s.logprobs.logprob == own[i, s.token_id] for i, s in enumerate(drawn))


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(2)
    sampling = Sampling(seed=3, temperature=0.2, top_k=1, repetition_penalty=3.0, top_logprobs=4)
    first, second = sample(logits, [chunk(sampling, prompt=[0, 1]), chunk(Sampling(seed=1))])
    expected = logits.log_softmax(-1)[0]
    assert second.logprobs is None
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(expected[first.token_id].item())
    values, ids = expected.topk(4)
    assert [i for i, _ in first.logprobs.top] == ids.tolist()
    assert [v for _, v in first.logprobs.top] == pytest.approx(values.tolist())


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = random_logits(5)
    logits[1, 7] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, 4] = float("-inf")
    chunks = [chunk(Sampling(seed=i, temperature=float(i % 2), top_p=0.9)) for i in range(5)]
    drawn = sample(logits, chunks)
    assert [s.error is not None for s in drawn] == [False, True, True, False, False]
    clean = [0, 3, 4]
    assert [drawn[i] for i in clean] == sample(logits[clean], [chunks[i] for i in clean])


def test_a_callers_values_are_no_fault_of_the_model() -> None:
    logits = random_logits(4)
    logits[:, 7] = 3e38
    extreme = [
        Sampling(seed=1, temperature=t, top_p=p, repetition_penalty=1e-38) for t in (0.0, 1.0) for p in (0.5, 1.0)
    ]
    drawn = sample(logits, [chunk(sampling, prompt=[7], output=[3]) for sampling in extreme])
    assert [(s.token_id, s.error) for s in drawn] == [(7, None)] * 4
    logits[0] = float("-inf")
    assert sample(logits[:1], [chunk(extreme[0])])[0].error is not None


def test_half_precision_logits() -> None:
    logits = random_logits(2).bfloat16()
    assert sample(logits, [chunk(Sampling(seed=1))] * 2)[0].error is None
