"""Arguments in Gemma's notation: what the grammar takes, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from manylora_router.dialect.marked_arguments import marked_arguments
from manylora_router.dialect.writing import Marks

TOKENS = LLTokenizer("byte")


def takes(schema: dict[str, Any], text: str) -> bool:
    rules = marked_arguments("<q>", "<end>")("start", schema, Marks([], {}.get))
    matcher = LLMatcher(TOKENS, LLMatcher.grammar_from_lark("\n".join(rules)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


STRING = {"type": "string"}
THREE: dict[str, Any] = {
    "properties": {"a": STRING, "b": {"type": "integer"}, "c": {"type": "null"}},
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (THREE, "{b:1}", "{}"),
        (THREE, "{a:<q>x<q>,b:1,c:null}", "{b:1,a:<q>x<q>}"),
        (THREE, "{b:-3,c:null}", "{b:1,}"),
        ({"properties": {"a b": STRING}}, "{<q>a b<q>:<q><q>}", "{a b:<q><q>}"),
        ({"properties": {"a": {**STRING, "minLength": 2, "maxLength": 3}}}, "{a:<q>xyz<q>}", "{a:<q>x<q>}"),
        ({"properties": {"a": {"enum": ["x", 1, None]}}}, "{a:<q>x<q>}", "{a:x}"),
        ({"properties": {"a": {"type": "array", "items": STRING, "maxItems": 2}}}, "{a:[<q>x<q>,<q>y<q>]}", "{a:[1]}"),
        ({"properties": {"a": {"type": "array", "items": STRING, "minItems": 1}}}, "{a:[<q>x<q>]}", "{a:[]}"),
        ({"properties": {"a": {"type": "number", "minimum": 2}}}, "{a:2.5}", "{a:1}"),
        ({"additionalProperties": {"type": "boolean"}}, "{any:true,other:false}", "{any:1}"),
        ({}, "{a:[<q>x<q>,1,{b:null}]}", "{1a:1}"),
        (
            {"properties": {"t": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}}}},
            "{t:{t:{t:{}}}}",
            "{t:1}",
        ),
    ],
)  # fmt: skip
def test_what_it_takes(schema: dict[str, Any], yes: str, no: str) -> None:
    assert takes(schema, yes)
    assert not takes(schema, no)
