"""What a chat template says of its answers, and reasoning in them."""

from __future__ import annotations

import pytest
from manylora_router.dialect.dialect import THINKING, Dialect, words_of
from manylora_router.dialect.grammars import FAMILIES
from manylora_router.dialect.pieces import Reasoning
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
    assert {"[TOOL_CALLS]", "[THINK]"} <= set(Dialect.of("[TOOL_CALLS][/THINK]").marks)
