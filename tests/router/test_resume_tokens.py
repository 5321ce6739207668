"""Resume tokens: what a router of the cluster gave, to whom, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_router.guard.admission import RequestInput, Resume, TokenPrompt
from manylora_router.guard.resume_tokens import Begun, ResumeTokens, check, digest_of, go_on
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import TenantId
from manylora_shared.sampling import Sampling
from manylora_sim.peers import SIMULATED

PROMPT = [5, 6, 7]
BEGUN = Begun("f" * 32, TenantId("acme"), digest_of(PROMPT), "up@3+low@1:0.5", 2**64 - 1, 2, 40, 90, 12, 1000.0)
TOKENS = ResumeTokens(SIMULATED.sign)


def resumed(*emitted: tuple[list[int], int], **fields: object) -> RequestInput:
    given = {"n": 2, "resume": Resume(TOKENS.seal(BEGUN), 3, emitted), **fields}
    return RequestInput(TokenPrompt(PROMPT), **given)  # type: ignore[arg-type]


def test_what_is_sealed_is_opened_for_its_tenant_until_it_expires() -> None:
    token = TOKENS.seal(BEGUN)
    assert TOKENS.open(token, "acme", 999.0) == BEGUN
    with pytest.raises(InvalidRequest, match="has expired"):
        TOKENS.open(token, "acme", 1001.0)
    with pytest.raises(InvalidRequest, match="is not one that a router of this cluster gave"):
        TOKENS.open(token, "other", 999.0)


@given(st.text(max_size=80), st.integers(0, 400), st.characters())
def test_nothing_else_is_a_token(made_up: str, at: int, char: str) -> None:
    token = TOKENS.seal(BEGUN)
    changed = token[: at % len(token)] + char + token[at % len(token) + 1 :]
    for wrong in (made_up, changed):
        if wrong != token:
            with pytest.raises(InvalidRequest):
                TOKENS.open(wrong, "acme", 0.0)


def test_a_token_of_another_cluster_is_none() -> None:
    foreign = ResumeTokens(lambda data: bytes(32))
    with pytest.raises(InvalidRequest):
        foreign.open(TOKENS.seal(BEGUN), "acme", 0.0)


def test_the_request_is_as_it_was_begun() -> None:
    request = go_on(resumed(sampling=Sampling(temperature=0.5), max_tokens=90, adapter="up"), BEGUN)
    assert (request.adapter, request.max_tokens) == ("up@3+low@1:0.5", 40)
    assert (request.sampling.seed, request.sampling.temperature) == (2**64 - 1, 0.5)


def test_what_the_caller_has_is_checked() -> None:
    emitted = ([1, 2], 2), ([], 0)
    check(resumed(*emitted), BEGUN, PROMPT, 100)
    wrongs = [
        (resumed(*emitted), [5, 6], "another prompt"),
        (replace(resumed(*emitted), n=1), PROMPT, "another prompt or n"),
        (resumed(([1], 1)), PROMPT, "one a choice, 2"),
        (resumed(([1] * 41, 1), ([], 0)), PROMPT, "more tokens than max_tokens, 40"),
        (resumed(([100], 1), ([], 0)), PROMPT, "beyond the vocabulary of 100"),
        (resumed(*emitted, sampling=Sampling(prompt_logprobs=1)), PROMPT, "prompt_logprobs"),
    ]
    for request, prompt, message in wrongs:
        with pytest.raises(InvalidRequest, match=message):
            check(request, BEGUN, prompt, 100)
