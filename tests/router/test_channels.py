"""Answers in channels: what is told apart, and what they can be made to be. Their calls: test_grammars."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from manylora_router.dialect.blocks import Kind
from manylora_router.dialect.dialect import THINKING, Dialect
from manylora_router.dialect.grammars import FAMILIES, Family
from manylora_router.dialect.pieces import Reasoning
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import refusal, rule_of
from test_grammars import read, said
from test_writing import AGAIN, OPEN, PLACE, ROLE, tokenizer_of, walk
from test_writing import read as read_blocks

ANALYSIS, FINAL, PREAMBLE = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
CHANNELS = Dialect(FAMILIES["gpt-oss"], THINKING["gpt-oss"])


@pytest.mark.parametrize(
    ("prompt_end", "answer", "reasoning", "text"),
    [
        (ROLE, f"{ANALYSIS}Hm.<|end|>{ROLE}{FINAL}Yes", "Hm.", "Yes"),
        (ROLE, f"{ANALYSIS}One.<|end|>{ROLE}{ANALYSIS}Two.", "One.\n\nTwo.", ""),
        (ROLE, f"{FINAL}Yes ", "", "Yes "),
        (f"{ROLE}{ANALYSIS}", f"Hm. <|end|>{ROLE}{FINAL}Yes", "Hm.", "Yes"),
        (f"{ROLE}{FINAL}Ye", "s<|return|>", "", "s"),
        (ROLE, "<|channel|>final to=functions.f<|message|>{}", "", "<|channel|>final to=functions.f<|message|>{}"),
        ("", "Yes", "", "Yes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", [None, FAMILIES["gpt-oss"]])
def test_channels_are_told_apart_without_tools(
    family: Family | None, prompt_end: str, answer: str, reasoning: str, text: str
) -> None:
    for parts in ([answer], list(answer)):
        pieces = read(Dialect(family, THINKING["gpt-oss"]).reader({}, prompt_end), parts)
        assert "".join(p.text for p in pieces if isinstance(p, Reasoning)) == reasoning
        assert said(pieces) == text


@pytest.mark.parametrize("are_tokens", [True, False])
def test_in_channels_an_answer_is_what_it_must_be_or_a_call(are_tokens: bool) -> None:
    """Free text or one constrained, behind reasoning or not."""
    marks = list(dict.fromkeys(CHANNELS.marks)) if are_tokens else []
    tokenizer, _ = tokenizer_of(tuple(marks))
    functions, answer = {"weather": PLACE, "free": OPEN}, rule_of(Constraint.json_schema(PLACE), "answer")
    kinds = set()
    for seed in range(12):
        begun = [
            "",
            ANALYSIS,
            f"{ANALYSIS}hm{AGAIN}{PREAMBLE}so{AGAIN}<|channel|>commentary to=functions.weather",
            FINAL,
        ][seed % 4]
        is_constrained, prompt_end = seed % 3 == 0 and seed % 4 != 2, ROLE if seed % 5 else f"{ROLE}{ANALYSIS}"
        begun = begun if prompt_end == ROLE else f"hm{AGAIN}"
        token_of = tokenizer.token_to_id
        if is_constrained:
            grammar = CHANNELS.calls_grammar(functions, prompt_end, token_of, is_one=True, answer=answer)
        else:
            grammar = CHANNELS.strict_grammar(functions, ["weather"], prompt_end, token_of, is_one=False)
        assert refusal(Constraint(ConstraintKind.GRAMMAR, grammar)) is None
        blocks = read_blocks(CHANNELS, functions, walk(grammar, marks, random.Random(seed), begun), prompt_end, None)
        text, found = blocks.text_of(Kind.TEXT), blocks.of(Kind.CALL)
        assert len(found) <= 1
        assert found or text or not is_constrained
        if text and is_constrained:
            jsonschema.validate(json.loads(text), PLACE)
        for call in found:
            jsonschema.validate(json.loads(call.text), functions[call.name] if call.name == "weather" else {})
        kinds |= {Kind.CALL} if found else {Kind.TEXT} if text else set()
        kinds |= {Kind.REASONING} if blocks.text_of(Kind.REASONING) else set()
    assert kinds == set(Kind)
    goes_on = CHANNELS.strict_grammar(functions, ["weather"], f"{FINAL}It", tokenizer.token_to_id, is_one=True)
    assert read_blocks(CHANNELS, functions, walk(goes_on, marks, random.Random(1)), f"{FINAL}It", None).text_of(
        Kind.TEXT
    )
