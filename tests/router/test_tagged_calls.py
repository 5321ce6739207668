"""Parameters in tags, as their schemas read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from manylora_router.dialect.pieces import CallArguments, Output, Stream
from manylora_router.dialect.tagged_calls import tagged_call

STRING, NULL = {"type": "string"}, {"type": "null"}
ENUM: dict[str, Any] = {"$ref": "#/$defs/e"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "\n12\n", "12"),
        (STRING, "\n\na\n\n", "\na\n"),
        (STRING, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "\nnull\n", None),
        ({"anyOf": [ENUM, NULL]}, "x", "x"),
        ({"type": "integer"}, "\n12\n", 12),
        ({"type": "integer"}, "\ntwelve\n", "twelve"),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, '{"a": "</parameter>", "b": [1]}', {"a": "</parameter>", "b": [1]}),
        ({"type": "array"}, "[1, ", "[1, "),
        ({}, " [1] ", [1]),
        (None, "1e999", "1e999"),
        ({"$ref": "#/nowhere"}, "x", "x"),
    ],
)
def test_a_parameter_is_read_by_its_schema(schema: Any, text: str, value: Any) -> None:
    function = {"properties": {} if schema is None else {"p": schema}, "$defs": {"e": {"enum": ["x", "null"]}}}
    answer = f"<tool_call><function=f><parameter=p>{text}</parameter></function></tool_call>!"
    stream, out = Stream(), Output()
    reading = tagged_call(stream, out, {"f": function})
    with pytest.raises(StopIteration) as ended:  # noqa: PT012
        for character in answer:
            stream.text += character
            next(reading)
        stream.is_over = True
        next(reading)
    [given] = [piece.text for piece in out.drain() if isinstance(piece, CallArguments)]
    assert (ended.value.value, json.loads(given)) == (True, {"p": value})
