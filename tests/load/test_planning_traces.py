from __future__ import annotations

import pytest
from manylora.load.planning.arrivals import TraceRow
from manylora.load.planning.fields import BadMix
from manylora.load.planning.traces import rows_of

AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,0",
]
MOONCAKE = [
    '{"timestamp": 500, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]}',
    "",
    '{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [7]}',
]


def test_azure_s_form() -> None:
    first, second = rows_of(AZURE, "a.csv")
    assert first == TraceRow(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)
    assert second.output_tokens == 1  # one is asked for at least


def test_mooncake_s_form_in_order_of_time() -> None:
    assert rows_of(MOONCAKE, "m.jsonl") == (TraceRow(0.0, 10, 3, (7,)), TraceRow(0.5, 20, 5, (7, 8)))


def test_plain_seconds() -> None:
    assert rows_of(["at_s,prompt_tokens,output_tokens", "3,1,2", "4.5,1,2"], "x")[1].at_s == 1.5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "x: has no requests"),
        (["a,b", "1,2"], "x: line 2: has none of the fields contexttokens"),
        ([*AZURE[:2], "yesterday,1,2"], "x: line 3: Invalid isoformat"),
        (['{"timestamp": 1}'], "x: line 1: has none"),
        ([*MOONCAKE, "{"], "x: line 4:"),
        ([MOONCAKE[0], "[]"], "x: line 2:"),
        (["time,prompt_tokens,output_tokens", "1,-1,2"], "x: line 2: a count"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(BadMix) as caught:
        rows_of(lines, "x")
    assert str(caught.value).startswith(message)
