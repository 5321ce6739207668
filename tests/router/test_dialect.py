"""What a chat template says of its answers, and reasoning in them."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer
from manylora_router.dialect.dialect import THINKING, Dialect, words_of
from manylora_router.dialect.grammars import FAMILIES
from manylora_router.dialect.pieces import Reasoning
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.constraints.grammar import grammar_of, refusal, rule_of
from test_grammars import read, said


@pytest.mark.parametrize(
    ("prompt_end", "answer", "reasoning", "text"),
    [
        ("", "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        ("<|im_start|>assistant\n<think>\n", "hm</think>Yes", "hm", "Yes"),
        ("<think>\n\n</think>\n\n", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("", " Yes", "", " Yes"),
        ("", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("", "<think>for ever", "for ever", ""),
    ],
)
def test_reasoning_is_told_apart(prompt_end: str, answer: str, reasoning: str, text: str) -> None:
    for parts in ([answer], list(answer)):
        pieces = read(Dialect(None, THINKING["think"]).reader({}, prompt_end), parts)
        assert "".join(p.text for p in pieces if isinstance(p, Reasoning)) == reasoning
        assert said(pieces) == text


ROLE, ANALYSIS, FINAL = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def test_a_template_says_its_dialect() -> None:
    qwen = "{% if tools %}{# documents #}<tool_call>{{ m['tool_calls'] }}{{ '<think> tools' }}</think>{% endif %}"
    dialect = Dialect.of(qwen)
    assert (dialect.family, dialect.thinking) == (FAMILIES["hermes"], THINKING["think"])
    assert dialect.takes_tools
    assert words_of(qwen) >= {"tools", "tool_calls"}
    assert "documents" not in words_of(qwen)
    assert Dialect.of(qwen, "none", "none") == Dialect(words=dialect.words)
    assert Dialect.of("{{ 'tools' + messages }}", "mistral", "gemma").family == FAMILIES["mistral"]
    assert Dialect.of("[TOOL_CALLS]").family == FAMILIES["mistral-list"]
    assert Dialect.of("[TOOL_CALLS][ARGS]").family == FAMILIES["mistral"]
    assert Dialect.of("<tool_call>\n<function=").family == FAMILIES["qwen-coder"]
    assert Dialect.of("") == Dialect()
    gpt_oss = Dialect.of("{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}")
    assert (gpt_oss.family, gpt_oss.thinking) == (FAMILIES["gpt-oss"], THINKING["gpt-oss"])
    assert {"<|channel|>", "<|message|>", "<|call|>"} <= set(gpt_oss.marks)
    assert Dialect.of("<|user|>{{ m }}<|end|>") == Dialect(words=frozenset("m")), "of Phi"
    assert {"[TOOL_CALLS]", "[THINK]"} <= set(Dialect.of("[TOOL_CALLS][/THINK]").marks)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint.json_schema({"properties": {"a": {"type": "null"}}, "required": ["a"]}), '{"a":null}'),
        (Constraint.json_object(), "{}"),
        (Constraint.regex("[0-9]+/(?:a|b)\\/\n"), "12/b/\n"),
        (Constraint.of_choices(["yes", 'n"o']), 'n"o'),
        (Constraint.grammar('start: "a" x "}"\nx: "b" | "c"'), "ac}"),
        (Constraint.grammar('root ::= "a" x "}"\nx ::= "b" | "c"'), "ac}"),
    ],
)
def test_an_answer_is_constrained_behind_its_reasoning(constraint: Constraint, text: str) -> None:
    tokens = LLTokenizer("byte")
    end = f"<|end|>{ROLE}{FINAL}"
    for thinking, prompt_end, answers in (
        ("think", "<think>\n", [f"hm</think>\n\n{text}"]),
        ("think", "", [f"<think>hm</think>{text}", text]),
        ("think", "<think>\n</think>\n", [text]),
        ("gpt-oss", ROLE, [f"{ANALYSIS}hm{end}{text}", f"{FINAL}{text}"]),
        ("gpt-oss", f"{ROLE}{ANALYSIS}", [f"hm{end}{text}"]),
        ("gpt-oss", f"{ROLE}{FINAL}It", [text]),
    ):
        dialect = Dialect(None, THINKING[thinking])
        grammar = dialect.behind_reasoning(rule_of(constraint, "answer"), prompt_end, {}.get)
        assert refusal(Constraint.grammar(grammar)) is None
        for answer in answers:
            matcher = LLMatcher(tokens, grammar_of(Constraint.grammar(grammar)), log_level=0)
            ids = list(answer.encode())
            assert matcher.consume_tokens(ids)
            assert matcher.is_accepting()
            pieces = read(dialect.reader({}, prompt_end), [answer])
            assert said(pieces) == text
        wrong = LLMatcher(tokens, grammar_of(Constraint.grammar(grammar)), log_level=0)
        assert wrong.validate_tokens(list(f"{answers[0]}!".encode())) <= len(answers[0].encode())
