"""Sampled answers with guesses have the model's own distribution: chi-square of whole answers against exact
probabilities of transformers. Rules of acceptance that are wrong fail the same check.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.kinds.api import EngineRequest, Sampled, Sampling, SequenceChunk
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from transformers import LlamaConfig, LlamaForCausalLM

from tests.numerics.test_drafter import DRAFTING, answers, settings_of, with_words
from tests.numerics.test_guesses import Answers

VOCAB = 4
ANSWER = 5  # of its tokens the first has no guess, the others have
CHOICES = 8
ANSWERS = 4_000
TOO_FAR = 4.0  # standard deviations: of right draws one run in ten thousand


def three_of_each(vocab: int) -> tuple[int, ...]:
    """A prompt in which any three tokens stand, so that lookup finds what to guess behind all that is drawn."""
    text = [0, 0, 0]
    seen = {(0, 0, 0)}
    while len(seen) < vocab**3:
        token = next(t for t in reversed(range(vocab)) if (text[-2], text[-1], t) not in seen)
        text.append(token)
        seen.add((text[-3], text[-2], text[-1]))
    return tuple(text)


# The draft model sees a long prompt in parts, for longer than the answer.
KINDS = [
    pytest.param((TenantShare(speculating=frozenset(QosClass)), three_of_each(VOCAB)), id="lookup"),
    pytest.param((DRAFTING, (1, 2, 3)), id="draft"),
]
Kind = tuple[TenantShare, tuple[int, ...]]
Exact = Callable[[tuple[int, ...]], dict[tuple[int, ...], float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its distribution is uneven, and another behind each token."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.13, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("four-tokens")
    made.save_pretrained(folder / "plain")
    return with_words(folder / "model", folder / "plain")


@pytest.fixture(scope="module")
def draft(model: Path) -> Path:
    """Another model: it is wrong more often than not."""
    torch.manual_seed(20)
    config = LlamaConfig.from_pretrained(model)
    config.num_hidden_layers = 1
    made = LlamaForCausalLM(config)
    made.save_pretrained(model.parent / "other")
    return with_words(model.parent / "draft", model.parent / "other")


@pytest.fixture(scope="module")
def exact(model: Path) -> Exact:
    """The probability of each answer behind a prompt."""
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = list(itertools.product(range(VOCAB), repeat=ANSWER))

    @cache
    def of(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        heads = torch.tensor([(*prompt, *answer[:-1]) for answer in found])
        with torch.no_grad():
            logits = torch.cat([reference(part).logits[:, len(prompt) - 1 :] for part in heads.split(256)])
        own = logits.double().log_softmax(-1).gather(2, torch.tensor(found)[:, :, None])[:, :, 0].sum(1).exp()
        assert own.sum().item() == pytest.approx(1)
        assert own.max() > 8 * own.median(), "too even to tell much"
        return dict(zip(found, own.tolist(), strict=True))

    return of


@pytest.fixture(autouse=True)
def all_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few guesses are right, and whatever they cost: the draft model is half of the other."""
    monkeypatch.setattr("manylora_worker.kinds.speculation._WORTH", 0.0)
    monkeypatch.setattr("manylora_worker.kinds.guessing._FIRST_PRICE", 0.0)
    monkeypatch.setattr("manylora_worker.planning.drafts.Drafts._cost", lambda *_: 0)


def answered(
    model: Path, draft: Path, store: Path, kind: Kind, device: str = "cpu", count: int = ANSWERS
) -> tuple[Answers, int, int]:
    """Also the guesses, and the right ones."""
    share, prompt = kind
    asked = [
        EngineRequest(
            RequestId(f"{seed}"), TenantId("t"), QosClass.STANDARD, None, prompt, ANSWER, Sampling(seed=seed), n=CHOICES
        )
        for seed in range(count // CHOICES)
    ]
    parts = build_engine(settings_of(model, draft, store, device))
    try:
        got, core = answers(parts, asked, share, at_once=1)
    finally:
        parts.backend.close()
    return got, core.stats().guessed_tokens, core.stats().right_guesses


def excess(got: Answers, exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of whole answers, in its own standard deviations above what is expected; rare answers are one cell."""
    counts = Counter(tuple(answer) for answer in got.values())
    total, chi_square, cells = len(got), 0.0, 0
    rare = [0.0, 0.0]
    for answer, probability in exact.items():
        expected, found = probability * total, counts[answer]
        if expected < 5:
            rare[0] += expected
            rare[1] += found
            continue
        chi_square += (found - expected) ** 2 / expected
        cells += 1
    if rare[0] > 5:
        chi_square += (rare[1] - rare[0]) ** 2 / rare[0]
        cells += 1
    assert cells > 100
    return float((chi_square - (cells - 1)) / (2 * (cells - 1)) ** 0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_the_models_distribution(
    model: Path, draft: Path, exact: Exact, tmp_path: Path, kind: Kind, device: str
) -> None:
    got, guessed, right = answered(model, draft, tmp_path, kind, device)
    assert len(got) == ANSWERS
    assert 0.05 * guessed < right < 0.7 * guessed, "both kinds of guesses are to be judged often"
    assert guessed > ANSWERS / 4
    assert excess(got, exact(kind[1])) < TOO_FAR
    plain, none, _ = answered(model, draft, tmp_path, (TenantShare(), kind[1]), device, count=400)
    assert none == 0
    same = sum(got[key] == answer for key, answer in plain.items())
    assert same == len(plain) if device == "cpu" else same > 0.98 * len(plain), "a draw is of its seed and position"


def _accepts_all(chunks: Iterable[SequenceChunk], drawn: Iterable[Sampled]) -> list[Sampled]:
    """A guess that is wrong counts as what was drawn there."""
    draws, found = iter(drawn), []
    for chunk in chunks:
        first = next(draws)
        guesses = chunk.token_ids[len(chunk.token_ids) - chunk.num_guesses :]
        behind = [next(draws).token_id for _ in guesses]
        found.append(replace(first, token_id=guesses[0], further=[*guesses[1:], behind[-1]]) if behind else first)
    return found


def _goes_on_behind_a_wrong_one(chunks: Iterable[SequenceChunk], drawn: Iterable[Sampled]) -> list[Sampled]:
    """What was drawn behind the first wrong guess counts too."""
    draws, found = iter(drawn), []
    for chunk in chunks:
        first = last = next(draws)
        further: list[int] = []
        is_right = True
        for guess in chunk.token_ids[len(chunk.token_ids) - chunk.num_guesses :]:
            behind = next(draws)
            if is_right:
                further.append(behind.token_id)
            is_right = is_right and last.token_id == guess
            last = behind
        found.append(replace(first, further=further))
    return found


def _draws_alike(chunk: SequenceChunk) -> list[SequenceChunk]:
    """All draws of a step with the noise of the first."""
    return [chunk] * (1 + chunk.num_guesses)


@pytest.fixture(params=[_accepts_all, _goes_on_behind_a_wrong_one, _draws_alike], ids=lambda rule: rule.__name__)
def wrong_rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "torch.inputs.draws_of" if request.param is _draws_alike else "layers.prompt_scores.joined"
    monkeypatch.setattr(f"manylora_worker.models.{place}", request.param)


@pytest.mark.usefixtures("wrong_rule")
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_rule_of_acceptance_is_seen(model: Path, draft: Path, exact: Exact, tmp_path: Path, kind: Kind) -> None:
    got, guessed, _ = answered(model, draft, tmp_path, kind)
    assert guessed > ANSWERS / 4
    assert excess(got, exact(kind[1])) > TOO_FAR
