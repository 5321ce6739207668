"""Bars against the plain reading of min_tokens and bad words, whether the last token is known or pending."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.kinds.api import ANY_TOKEN, EngineRequest, Sampling
from manylora_worker.kinds.bars import RequestBars

_TOKENS = st.integers(0, 3)


def request(min_tokens: int, stops: set[int], words: list[tuple[int, ...]]) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId("r"),
        tenant_id=TenantId("a"),
        qos_class=QosClass.STANDARD,
        adapter_uid=None,
        prompt_token_ids=(1, 2, 3),
        max_tokens=20,
        sampling=Sampling(seed=1, min_tokens=min_tokens),
        stop_token_ids=frozenset(stops),
        bad_sequences=tuple(words),
    )


def barred(asked: EngineRequest, output: list[int]) -> set[int]:
    """The rule itself."""
    stops = asked.stop_token_ids if len(output) < asked.sampling.min_tokens else frozenset()
    words = {word[-1] for word in asked.bad_sequences if (*output, word[-1])[-len(word) :] == word}
    return words | stops


@given(
    st.integers(0, 6),
    st.sets(_TOKENS, max_size=2),
    st.lists(st.lists(_TOKENS, min_size=1, max_size=4).map(tuple), max_size=6),
    st.lists(_TOKENS, max_size=10),
)
def test_known_or_pending_the_same_tokens_are_barred(
    min_tokens: int, stops: set[int], words: list[tuple[int, ...]], output: list[int]
) -> None:
    asked = request(min_tokens, stops, words)
    bars = RequestBars(asked)
    assert {token for token, _ in bars.after(output, 0)} == barred(asked, output)
    assert all(before == ANY_TOKEN for _, before in bars.after(output, 0))
    if output:
        found = bars.after(output[:-1], 1)
        assert {token for token, before in found if before in (ANY_TOKEN, output[-1])} == barred(asked, output)


def test_a_request_without_either_has_none() -> None:
    assert RequestBars.of(request(0, {1}, [])) is None
    assert RequestBars.of(request(1, set(), [])) is not None
