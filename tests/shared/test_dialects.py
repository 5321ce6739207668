"""The names of parsers are those that routers have."""

from typing import get_args

from manylora_router.dialect.dialect import AUTO, NONE, THINKING
from manylora_router.dialect.grammars import FAMILIES
from manylora_shared.dialects import ReasoningParser, ToolParser


def test_each_name_is_a_parser() -> None:
    assert get_args(ToolParser) == (AUTO, NONE, *FAMILIES)
    assert set(get_args(ReasoningParser)) == {AUTO, NONE, *THINKING}
