"""The table of sampling parameters against the proto, and its words."""

from __future__ import annotations

import dataclasses
import math

import pytest
from manylora.v1 import common_pb2
from manylora_shared.sampling import MODEL_DEFAULTS, PARAMETERS, Kind, Range, Sampling, barred_too_much

GIVEN = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "seed": 0,
    "top_logprobs": 0,
    "logit_bias": {3: -1.5},
    "min_tokens": 4,
    "bad_words": ("no", " never"),
    "prompt_logprobs": 0,
    "allowed_token_ids": (5, 9),
}


def test_the_proto_and_the_table_have_the_same_fields() -> None:
    by_name = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(by_name) == {row.name for row in PARAMETERS} == set(GIVEN)
    for row in PARAMETERS:
        several = row.kind not in (Kind.NUMBER, Kind.COUNT)
        assert by_name[row.name].is_repeated is several
        assert by_name[row.name].has_presence is not several


def test_there_and_back() -> None:
    message = common_pb2.SamplingParams(**Sampling(**GIVEN).given())
    assert dataclasses.asdict(Sampling.of_message(message)) == GIVEN


def test_a_bound_itself_is_allowed_over_the_wire() -> None:
    message = common_pb2.SamplingParams(temperature=1e-5, repetition_penalty=0.01)
    assert Sampling.of_message(message).violations(10) == []


def test_what_the_wire_would_round_to_a_bound_is_refused_before() -> None:
    """A router that took it would have its worker refuse it."""
    [found] = Sampling(top_p=1e-50).violations(10)
    assert (found.field, found.description) == ("sampling.top_p", "must be above 0 and at most 1, not 1e-50")
    assert Sampling(top_p=1e-30).violations(10) == []


def test_what_is_at_its_default_is_not_sent() -> None:
    assert Sampling().given() == {}
    assert Sampling(temperature=1.0, top_k=0).given() == {"temperature": 1.0, "top_k": 0}, "the caller says so"
    assert Sampling(temperature=1.0, top_k=0) == Sampling()
    assert Sampling.of_message(common_pb2.SamplingParams()) == Sampling()


@pytest.mark.parametrize(
    ("range_", "text", "good", "bad"),
    [
        (Range(0), "0 or more", [0, 7.5], [-0.1, math.inf, math.nan]),
        (Range(0, is_open=True), "above 0", [0.1], [0, math.inf]),
        (Range(1e-5, or_zero=True), "0, or 1e-05 or more", [0, -0.0, 1e-5, 3e38], [1e-6, -1e-5, math.inf, math.nan]),
        (Range(0.01, 100), "from 0.01 to 100", [0.01, 100], [0.0, 0.009, 100.1, 3e38]),
        (Range(0, 1), "from 0 to 1", [0, 1], [-0.1, 1.1, math.nan]),
        (Range(0, 1, is_open=True), "above 0 and at most 1", [0.1, 1], [0, 1.1]),
    ],
)
def test_ranges(range_: Range, text: str, good: list[float], bad: list[float]) -> None:
    assert str(range_) == text
    assert all(value in range_ for value in good)
    assert not any(value in range_ for value in bad)


def test_violations_name_the_field_and_what_is_right() -> None:
    sampling = Sampling(temperature=math.nan, top_p=0.0, top_logprobs=21, logit_bias={5: 101.0, 100: 1.0})
    assert [(v.field, v.description) for v in sampling.violations(100)] == [
        ("sampling.temperature", "must be 0, or 1e-05 or more, not nan"),
        ("sampling.top_p", "must be above 0 and at most 1, not 0"),
        ("sampling.top_logprobs", "must be from 0 to 20, not 21"),
        ("sampling.logit_bias[5]", "must be from -100 to 100, not 101"),
        ("sampling.logit_bias[100]", "is outside the model's vocabulary of 100 tokens"),
    ]
    many = Sampling(logit_bias=dict.fromkeys(range(2000), 0.0))
    assert [v.description for v in many.violations(10)] == ["has more than 1024 entries"]
    assert len(Sampling(logit_bias=dict.fromkeys(range(50), 200.0)).violations(100)) == 8


def test_bad_words_are_some_and_short() -> None:
    sampling = Sampling(bad_words=["fine", "", "\u00e9" * 33])
    assert [(v.field, v.description) for v in sampling.violations(100)] == [
        ("sampling.bad_words[1]", "must have from 1 to 64 bytes, not 0"),
        ("sampling.bad_words[2]", "must have from 1 to 64 bytes, not 66"),
    ]
    assert [v.description for v in Sampling(bad_words=["x"] * 65).violations(9)] == ["has more than 64 entries"]


def test_allowed_tokens_are_in_the_vocabulary() -> None:
    assert [(v.field, v.description) for v in Sampling(allowed_token_ids=[3, 100]).violations(100)] == [
        ("sampling.allowed_token_ids[1]", "100 is outside the model's vocabulary of 100 tokens")
    ]
    assert len(Sampling(allowed_token_ids=range(50, 99)).violations(10)) == 8
    assert [v.description for v in Sampling(allowed_token_ids=range(1025)).violations(9)] == [
        "has more than 1024 entries"
    ]


def test_some_allowed_token_is_left() -> None:
    assert barred_too_much([[1], [2, 3]], [4], 10, [1, 3, 4, 5]) == ""
    assert barred_too_much([[1], [2, 3]], [4], 10, [1, 3, 4]) == "leaves no token to draw"


@pytest.mark.parametrize(
    ("sequences", "stops", "problem"),
    [
        ([[1], [2, 3]], [4], ""),
        ([[1] * 1024], [], ""),
        ([[1] * 1000, [2] * 25], [], "has 1025 tokens, more than 1024"),
        ([[9], [10]], [], "has a token outside the model's vocabulary of 10 tokens"),
        ([[1], []], [], "has a word without a token"),
        ([[i] for i in range(7)], [7, 8, 9], "leaves no token to draw"),
    ],
)
def test_what_is_too_much(sequences: list[list[int]], stops: list[int], problem: str) -> None:
    assert barred_too_much(sequences, stops, 10) == problem


def test_a_models_defaults_are_for_what_nobody_has_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert Sampling().or_else(defaults) == Sampling(**defaults)
    message = common_pb2.SamplingParams(temperature=1.0, top_p=0.5)
    read = Sampling.of_message(message)
    assert read.or_else(defaults) == Sampling(top_p=0.5, top_k=20, repetition_penalty=1.05)
    later = dataclasses.replace(read, seed=3).or_else(defaults)
    assert later == Sampling(seed=3, top_p=0.5, top_k=20, repetition_penalty=1.05)
    assert Sampling.of_message(common_pb2.SamplingParams(**later.given())).top_k == 20
    everything = Sampling(**{name: value for name, value in GIVEN.items() if name in MODEL_DEFAULTS})
    assert everything.or_else({**defaults, "top_p": 0.1, "min_p": 0.1}) is everything
    assert dataclasses.replace(Sampling(), seed=1).given() == {"seed": 1}
