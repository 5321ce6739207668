"""What is planned for: a mix's requests, and the busiest part of a ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest
from manylora.capacity.files import read_mix
from manylora.capacity.planning.shapes import CannotPlan
from manylora.capacity.planning.traffic import traffic_of_ledger, traffic_of_mix

ROW: dict[str, Any] = {
    "tenant": "acme",
    "class": "batch",
    "adapter": "a+b",
    "prompt_tokens": 100,
    "cached_tokens": 32,
    "completion_tokens": 10,
    "began_unix_s": 1000.0,
}


def test_a_mix_is_what_a_load_of_it_sends() -> None:
    mix = read_mix(
        "arrivals: {rate: 10}\nduration_s: 30\ntenants: {a: {prefix_tokens: 40, adapters: [x], rank: 8, class: batch}}",
        "mix",
    )
    found = traffic_of_mix(mix, seconds=60, rank=16)
    assert found.requests_per_s == pytest.approx(10, rel=0.2)
    one = found.requests[0]
    assert (one.adapter, one.rank, one.qos_class) == ("a/x", 8, "batch")
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (128, 128, 32)


def test_a_closed_loop_has_no_rate() -> None:
    mix = read_mix("arrivals: {kind: closed, streams: 4}\nduration_s: 1\ntenants: {a: {}}", "mix")
    with pytest.raises(CannotPlan, match=r"tenants\.a\.arrivals: a closed loop has no rate to plan for"):
        traffic_of_mix(mix, seconds=60, rank=16)


def test_a_ledger_is_planned_for_its_busiest_window() -> None:
    rows = [{**ROW, "began_unix_s": 1000.0 + 10 * n} for n in range(100)]
    rows += [{**ROW, "began_unix_s": 1500.0 + n / 10} for n in range(200)]
    found = traffic_of_ledger(rows, window_s=20, rank=16)
    assert len(found.requests) == 202
    assert found.seconds == 20
    assert found.requests[0].at_s == 0
    one = found.requests[0]
    assert (one.tenant, one.qos_class, one.adapter, one.rank, one.cached_tokens) == (
        "acme",
        "batch",
        "acme/a+b",
        32,
        32,
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**ROW, "prompt_tokens": "many"}, "row 2: prompt_tokens: must be a whole number, not 'many'"),
        ({**ROW, "completion_tokens": 10**400}, "row 2: completion_tokens: must be at most 1099511627776, not 1000"),
        ({**ROW, "began_unix_s": None}, "row 2: began_unix_s: must be a number of seconds, not None"),
        ({**ROW, "began_unix_s": math.inf}, "row 2: began_unix_s: must be a number of seconds, not inf"),
        ({**ROW, "began_unix_s": math.nan}, "row 2: began_unix_s: must be a number of seconds, not nan"),
        ({**ROW, "began_unix_s": 10**400}, "row 2: began_unix_s: must be a number of seconds, not 1000"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotPlan, match=says):
        traffic_of_ledger([ROW, row], window_s=60, rank=16)


def test_rows_without_tokens_are_no_traffic() -> None:
    with pytest.raises(CannotPlan, match="no row has completion tokens"):
        traffic_of_ledger([{**ROW, "completion_tokens": 0}], window_s=60, rank=16)
