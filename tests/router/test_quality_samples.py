"""Samples of a quality gate: what is one, and what is told of what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from manylora_router.quality import samples as samples_module
from manylora_router.quality.samples import MAX_SAMPLES, MAX_SAMPLES_BYTES, judges_of, parse_samples, parsing
from manylora_shared.errors import InvalidRequest


def lines(*samples: Any) -> bytes:
    return b"\n".join(json.dumps(each).encode() for each in samples)


def test_prompts_and_messages_are_read_and_blank_lines_are_none() -> None:
    told = {"messages": [{"role": "user", "content": "hi"}], "expected": {"type": "object"}, "judge": "json_schema"}
    first, second = parse_samples(lines({"prompt": "a", "expected": "b", "max_tokens": 3}) + b"\n\n" + lines(told))
    assert (first.prompt, first.expected, first.max_tokens, first.asked) == ("a", "b", 3, "a")
    assert (second.prompt, second.messages, second.asked) == (None, [("user", "hi")], "user: hi")
    assert judges_of([first, second], "exact") == ["exact", "json_schema"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"prompt": "a", "answer": 1}', "'answer' is not one of"),
        (b'{"expected": "a"}', "needs prompt or messages"),
        (b'{"prompt": "a", "messages": []}', "needs prompt or messages"),
        (b'{"prompt": ""}', "prompt must be a text"),
        (b'{"messages": []}', "a list of 1 to"),
        (b'{"messages": [{"role": "user"}]}', "a message has role and content"),
        (b'{"prompt": "a", "judge": "taste"}', "judge must be one of"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be"),
        (b'{"prompt": "a", "expected": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "\\ud800"}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_none_is_told_at_its_line(line: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_samples(lines({"prompt": "a"}) + b"\n" + line)
    assert error.value.message.startswith("samples: line 2: ")
    assert told in error.value.message


def test_their_number_and_size_are_bounded_and_none_are_too_few() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_SAMPLES}"):
        parse_samples(lines(*[{"prompt": "a"}] * (MAX_SAMPLES + 1)))
    with pytest.raises(InvalidRequest, match="bytes, more than"):
        parse_samples(b" " * (MAX_SAMPLES_BYTES + 1))
    with pytest.raises(InvalidRequest, match="are none"):
        parse_samples(b"\n \n")


def test_what_a_judge_needs_must_be_there() -> None:
    samples = parse_samples(lines({"prompt": "a"}, {"prompt": "a", "expected": {"type": "string"}}))
    assert judges_of(samples, "json") == ["json", "json"]
    with pytest.raises(InvalidRequest) as error:
        judges_of(samples, "contains")
    assert len(error.value.violations) == 2
    with pytest.raises(InvalidRequest, match="sample 1: expected must be a JSON schema"):
        judges_of(samples, "json_schema")


def test_of_many_lines_at_fault_few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mebibyte of them would hold the event loop for seconds."""
    read: list[bytes] = []
    monkeypatch.setattr(samples_module, "_sample", lambda line: read.append(line) or _refuse())
    with pytest.raises(InvalidRequest) as refused:
        parse_samples(b"x\n" * 100_000)
    assert len(read) == len(refused.value.violations) == 16


def _refuse() -> None:
    raise ValueError("is not JSON")


def test_parsing_stops_often_and_bounds_what_it_holds() -> None:
    line = b'{"prompt": "a", "expected": %s}' % (b"[" * 100 + b"]" * 100)
    lines = b"\n".join([line] * 400)
    steps = sum(1 for _ in parsing(lines))
    assert steps >= len(lines) // 8192 - 1
    assert len(parse_samples(lines)) == 400
    with pytest.raises(InvalidRequest, match="values, more than"):
        parse_samples(b'{"prompt": "a", "expected": [%s]}' % b",".join([b"[]"] * 70_000))
