"""Answers of every family, whole and however cut, to their pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_router.dialect.dialect import THINKING, AnswerReader, Dialect
from manylora_router.dialect.grammars import FAMILIES
from manylora_router.dialect.pieces import CallArguments, CallBegin, CallEnd, Piece, Reasoning, Text

FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "ns.add": {},
    "f": {},
}
PARIS: dict[str, Any] = {"city": "Paris", "days": 3}
ARGUMENTS = {
    "s": 'a "quoted" \\ é\n{[',
    "n": -1.5,
    "i": 3,
    "b": True,
    "z": None,
    "l": [1, ["x"]],
    "o": {"k": {"q": "'"}},
}


def call(name: str, key: str = "arguments", /, **given: Any) -> str:
    return json.dumps({"name": name, key: given})


TAGGED = "<function=f><parameter=a>x < y</parameter></function>"
# family, answer, text of it, calls
WHOLE: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", "hello <tool_call", "hello <tool_call", []),
    ("hermes", f"<tool_call>\n{call('weather', **PARIS)}\n</tool_call>", "", [("weather", PARIS)]),
    ("hermes", f"Sure.\n\n<tool_call>{call('f', **ARGUMENTS)}</tool_call>\n", "Sure.", [("f", ARGUMENTS)]),
    ("hermes", f"<tool_call>[{call('f')}, {call('f', a=1)}]</tool_call> done", " done", [("f", {}), ("f", {"a": 1})]),
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "id": 7, "name": "f"}</tool_call>', "", [("f", {"a": [1]})]),
    ("hermes", "<tool_call>" + '{"name": "f"}' + "</tool_call>", "", [("f", {})]),
    ("hermes", "<tool_call>" + '{"name": "f", "arguments": {}, "id": "x"}' + "</tool_call>!", "!", [("f", {})]),
    ("hermes", f"{'<tool_call>' + call('f') + '</tool_call>'}\n" * 2, "", [("f", {}), ("f", {})]),
    ("llama", call("weather", "parameters", **PARIS), "", [("weather", PARIS)]),
    ("llama", f"<|python_tag|>{call('f', a=1)}; {call('f', 'parameters')}", "", [("f", {"a": 1}), ("f", {})]),
    ("llama", "It is {not} a call", "It is {not} a call", []),
    ("llama", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama", "[1, 2, 3]", "[1, 2, 3]", []),
    ("llama", "[weather(city='Paris', days=3)]", "", [("weather", PARIS)]),
    (
        "llama",
        r"""[ns.add(a=-1, b=[True, None, {'k': "it\'s )]"}]), f()]""",
        "",
        [("ns.add", {"a": -1, "b": [True, None, {"k": "it's )]"}]}), ("f", {})],
    ),
    ("mistral", f"[TOOL_CALLS] [{call('weather', **PARIS)}]", "", [("weather", PARIS)]),
    ("mistral", f"Well [TOOL_CALLS]f[ARGS]{json.dumps(ARGUMENTS)}", "Well", [("f", ARGUMENTS)]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1D[ARGS]{}[TOOL_CALLS]weather{"a": 1}', "", [("f", {}), ("weather", {"a": 1})]),
    (
        "qwen-coder",
        "Hm\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "Hm",
        [("weather", PARIS)],
    ),
    ("qwen-coder", f"<tool_call>{TAGGED}</tool_call>\n" * 2, "", [("f", {"a": "x < y"})] * 2),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        "",
        [("weather", PARIS)],
    ),
    (
        "function-gemma",
        "ok<start_function_call>call:f{a:<escape>x, }<escape>,o:{k:[1,true,null]}}<end_function_call>",
        "ok",
        [("f", {"a": "x, }", "o": {"k": [1, True, None]}})],
    ),
]  # fmt: skip
FINAL, ANALYSIS, SAY = (f"<|channel|>{name}<|message|>" for name in ("final", "analysis", "commentary"))
AGAIN = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
WHOLE += [
    ("gpt-oss", f"{FINAL}It is.\n", "It is.\n", []),
    ("gpt-oss", f"{ANALYSIS}Hm.{AGAIN}{FINAL}It is.<|return|>", "It is.", []),
    ("gpt-oss", f"{ANALYSIS}Hm.{AGAIN}{SAY}So {AGAIN}{TO_F}{json.dumps(ARGUMENTS)}<|call|>", "So", [("f", ARGUMENTS)]),
    ("gpt-oss", f"{SAY}One.{AGAIN}{SAY}Two.{AGAIN}{FINAL}", "One.\n\nTwo.", []),
    ("gpt-oss", " to=functions.f<|channel|>commentary json<|message|> {}<|call|>", "", [("f", {})]),
    ("gpt-oss", f'{TO_F}{{"a": 1}}<|call|><|start|>assistant{TO_F}{{}}', "", [("f", {"a": 1}), ("f", {})]),
    ("gpt-oss", "It goes on.<|return|>", "It goes on.", []),
    ("gpt-oss", f"It goes on.{AGAIN}{TO_F}{{}}", "It goes on.", [("f", {})]),
    ("gpt-oss", f"<|channel|>final <|constrain|>json<|message|>{{}}{AGAIN}", "{}", []),
    ("gpt-oss", "<|channel|>fin", "", []),
    ("gpt-oss", "to be, or", "to be, or", []),
]  # fmt: skip
BROKEN = [
    ("gpt-oss", f'{TO_F}{{"a": oops}}<|call|>'),
    ("gpt-oss", f'{TO_F}{{"a": "cut'),
    ("gpt-oss", f"{TO_F}no<|end|>"),
    ("gpt-oss", "<|channel|>commentary to=functions.nobody<|message|>{}<|call|>"),
    ("gpt-oss", "<|start|>assistant to=browser.search<|channel|>analysis<|message|>{}<|call|>"),
    ("gpt-oss", "<|channel|>" + "f" * 400),
    ("gpt-oss", "<|channel|>" + " " * 257 + "<|message|>x"),
    ("gpt-oss", "<|start|>user<|message|>and I?<|end|>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> and so on'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut'),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "</tool_call>"),
    ("hermes", "<tool_call><tool_call>"),
    ("llama", "[weather(city='Paris'"),
    ("llama", "[weather(city=Paris)]"),
    ("llama", "[weather(city='\\UFFFFFFFF')]"),
    ("llama", "[f(a=" + "[" * 100 + "]" * 100 + ")]"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "f" * 400),
    ("qwen-coder", "<tool_call><function=nobody></function></tool_call>"),
    ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=a>\nx"),
    ("qwen-coder", "<tool_call><function=f> and so on"),
    ("qwen-coder", "<tool_call>" + '{"name": "f", "arguments": {}}' + "</tool_call>"),
    ("gemma", "<|tool_call>call:f{a:}<tool_call|>"),
    ("function-gemma", "<start_function_call>call:f{a:1"),
]


def read(reader: AnswerReader, parts: list[str]) -> list[Piece]:
    return [piece for part in parts for piece in reader.push(part)] + reader.finish()


def merged(pieces: list[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Text | Reasoning | CallArguments) and type(last) is type(piece):
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found


def cuts(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def said(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def calls(pieces: list[Piece]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            found.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
    return [(name, json.loads(given)) for name, given in found]


def reader_of(family: str, **more: Any) -> AnswerReader:
    return Dialect(FAMILIES[family]).reader(FUNCTIONS, "", **more)


@pytest.mark.parametrize(("family", "answer", "text", "expected"), WHOLE)
def test_calls_are_read(family: str, answer: str, text: str, expected: list[tuple[str, Any]]) -> None:
    for parts in ([answer], list(answer)):
        reader = reader_of(family)
        pieces = read(reader, parts)
        assert (calls(pieces), said(pieces)) == (expected, text)
        assert sum(isinstance(piece, CallEnd) for piece in pieces) == len(expected)
        assert reader.has_calls == bool(expected)


@pytest.mark.parametrize(("family", "answer"), BROKEN)
def test_what_is_malformed_is_never_lost(family: str, answer: str) -> None:
    for parts in ([answer], list(answer)):
        reader = reader_of(family)
        pieces = read(reader, parts)
        assert not reader.has_calls
        told = [p.source if isinstance(p, CallBegin) else p.text for p in pieces if not isinstance(p, CallEnd)]
        assert "".join(told) == answer


BITS = [
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{}", '{"a": "b"}', "}", "[", "]", ",", ";", " "),
    *("[TOOL_CALLS]", "f", "[ARGS]", "<|python_tag|>", "f(a='x')", "<|tool_call>", "call:f{a:1}", "<tool_call|>", "x"),
    *("\n", "é", "<function=f>", "<parameter=a>", "</parameter>", "</function>"),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "final", " to=functions.f", "<|message|>", "<|end|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "1", '"', "\\"),
]  # fmt: skip


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from([None, *THINKING.values()]),
    st.lists(st.sampled_from(BITS), max_size=20).map("".join) | st.sampled_from([row[1] for row in WHOLE]),
    st.data(),
)
def test_pieces_are_the_same_however_the_text_is_cut(
    family: str, thinking: Any, answer: str, data: st.DataObject
) -> None:
    dialect = Dialect(FAMILIES[family], thinking)
    whole = merged(read(dialect.reader(FUNCTIONS, ""), [answer]))
    assert merged(read(dialect.reader(FUNCTIONS, ""), cuts(data, answer))) == whole
    assert merged(read(dialect.reader(FUNCTIONS, ""), list(answer))) == whole


def test_arguments_come_as_they_are_written() -> None:
    reader = reader_of("hermes")
    assert reader.push('<tool_call>{"name": "f", "arguments": {"a') == [
        CallBegin("f", '<tool_call>{"name": "f", "arguments": '),
        CallArguments('{"a'),
    ]
    assert reader.push('": "x') == [CallArguments('": "x')]
    assert reader.push('"}') == [CallArguments('"}'), CallEnd()]
    assert reader.push("}</tool_call>") == []


def test_only_the_first_call_is_told_where_one_is_asked() -> None:
    answer = f"a<tool_call>{call('f')}</tool_call><tool_call>{call('weather')}</tool_call>b"
    pieces = read(reader_of("hermes", most_calls=1), [answer])
    assert (calls(pieces), said(pieces)) == ([("f", {})], "ab")
