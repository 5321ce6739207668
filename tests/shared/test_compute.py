from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.ledger.compute import NO_SHAPE, ModelShape

_SHAPE = ModelShape(layer_parameters=1000, head_parameters=50, attention=3)


@given(st.integers(1, 60), st.integers(0, 59), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_it_is_what_each_position_costs(prompt: int, cached: int, drawn: list[int]) -> None:
    cached = min(cached, prompt - 1)
    prefill = sum(2 * 1000 + 3 * (position + 1) for position in range(cached, prompt)) + 2 * 50
    assert _SHAPE.prefill(prompt, cached) == prefill
    decode = sum(2 * 1050 + 3 * (prompt + step + 1) for tokens in drawn for step in range(max(0, tokens - 1)))
    assert _SHAPE.decode(prompt, drawn) == decode


def test_of_a_llama_of_8b() -> None:
    """6.98 G parameters in 32 layers, 32 heads of 128, 128,256 tokens: two operations a parameter, and more."""
    shape = ModelShape(6_979_321_856, 4096 * 128_256, 4 * 32 * 32 * 128)
    assert 14.2e12 < shape.prefill(1000, 0) < 14.3e12
    assert 15.0e9 < shape.decode(1000, [2]) < 15.9e9


def test_what_is_not_known_or_not_computed_is_nothing() -> None:
    assert NO_SHAPE.prefill(10, 0) == NO_SHAPE.decode(10, [5]) == 0
    assert _SHAPE.prefill(0, 0) == 0
