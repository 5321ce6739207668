from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from manylora.load.planning.arrivals import TraceRow
from manylora.load.planning.mix import Mix, mix_of
from manylora.load.planning.schedule import Planned, closed_loops, open_loop

ROWS = (TraceRow(0.0, 1200, 30, (1, 2, 3)), TraceRow(2.0, 1100, 40, (1, 2, 9)), TraceRow(8.0, 100, 5, (4,)))
TENANTS: dict[str, Any] = {
    "many": {"share": 3, "adapters": ["a", "b", "c"], "zipf": 1, "base_part": 0.25, "prompt_tokens": "50-60"},
    "few": {"share": 1, "model": "base", "prefix_tokens": 40, "prompt_tokens": 100, "output_tokens": 7},
    "own": {"arrivals": {"kind": "constant", "rate": 2}},
}


def mix(**fields: Any) -> Mix:
    return mix_of({"duration_s": 300, "arrivals": {"rate": 50}, "tenants": TENANTS, **fields}, lambda name: ROWS)


def tokens(planned: Planned) -> int:
    return sum(piece.tokens for piece in planned.prompt)


def test_the_same_seed_plans_the_same_and_another_seed_does_not() -> None:
    assert list(open_loop(mix())) == list(open_loop(mix()))
    assert list(open_loop(mix())) != list(open_loop(mix(seed=2)))


def test_times_ascend_and_end() -> None:
    found = list(open_loop(mix()))
    times = [planned.at_s for planned in found]
    assert times == sorted(times)
    assert times[-1] < 300


def test_shares_and_adapters_are_the_mix_s() -> None:
    found = list(open_loop(mix()))
    whose = Counter(planned.tenant.name for planned in found)
    assert whose["own"] == 600
    assert whose["many"] / whose["few"] == pytest.approx(3, rel=0.06)
    models = Counter(planned.model for planned in found if planned.tenant.name == "many")
    assert models[""] / whose["many"] == pytest.approx(0.25, rel=0.06)
    assert models["a"] / models["c"] == pytest.approx(3, rel=0.12)


def test_lengths_and_prefixes() -> None:
    found = list(open_loop(mix()))
    few = [planned for planned in found if planned.tenant.name == "few"]
    assert {tokens(planned) for planned in few} == {100}
    assert {planned.output_tokens for planned in few} == {7}
    assert len({planned.prompt[0] for planned in few}) == 1
    assert len({planned.prompt[1] for planned in few}) == len(few)
    assert {tokens(planned) for planned in found if planned.tenant.name == "many"} <= set(range(50, 61))


def test_a_trace_s_times_lengths_and_shared_blocks() -> None:
    arrivals = {"kind": "trace", "file": "f", "speed": 2, "length_scale": 0.5}
    one, two, three = open_loop(mix_of({"arrivals": arrivals, "tenants": {"a": {}}}, lambda name: ROWS))
    assert [one.at_s, two.at_s, three.at_s] == [0, 1, 4]
    assert [tokens(one), tokens(two), tokens(three)] == [600, 550, 50]
    assert [one.output_tokens, two.output_tokens, three.output_tokens] == [15, 20, 2]
    assert one.prompt[:2] == two.prompt[:2]
    assert one.prompt[2] != two.prompt[2]
    assert [piece.tokens for piece in one.prompt] == [256, 256, 88]
    assert len(three.prompt) == 1


def test_a_closed_loop_has_streams_and_requests_without_end() -> None:
    closed = mix(arrivals={"kind": "closed", "streams": 5, "think_s": 0.5})
    (loop,) = closed_loops(closed)
    assert (loop.streams, loop.think_s) == (5, 0.5)
    drawn = list(itertools.islice(loop.requests, 4000))
    assert Counter(planned.tenant.name for planned in drawn)["many"] == pytest.approx(3000, rel=0.05)
    assert len({planned.prompt[-1] for planned in drawn}) == 4000
    assert {planned.tenant.name for planned in open_loop(closed)} == {"own"}
