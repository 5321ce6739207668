"""The fields that the OpenAPI document describes are those that the handlers ask for, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from http_fakes import http_front, request_bytes
from manylora_router.front.http import openapi
from manylora_router.front.http.fields import Fields

DOCUMENT: Any = openapi.document()
# with what lies deeper, so that it is read too
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
_FORMATS = {"response_format": {"json_schema": {}}, "structured_outputs": {}, "stream_options": {}}
_OPENS = {"add_generation_prompt": True}
_CALLED: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
_PARTS = {"role": "user", "content": [{"type": "text"}]}
_TYPED: list[dict[str, Any]] = [
    *({"role": "user", "content": [{"type": kind}]} for kind in ("text", "tool_result")),
    *({"role": "assistant", "content": [{"type": kind}]} for kind in ("thinking", "redacted_thinking", "tool_use")),
]
_ITEMS = [{"type": kind, "role": "user"} for kind in ("message", "function_call", "function_call_output", "reasoning")]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [_FORMATS],
    "/v1/chat/completions": [{**_FORMATS, "messages": [_CALLED, _PARTS], "tools": _TOOLS, **_OPENS}],
    "/v1/responses": [{**_FORMATS, "input": _ITEMS, "tools": _TOOLS, "text": {"format": {"type": "json_schema"}}}],
    "/v1/messages": [{**_FORMATS, "messages": _TYPED, "tools": [{"name": "f"}], "tool_choice": {}, "thinking": {}}],
    "/v1/messages/count_tokens": [{"messages": _TYPED, "tools": [{"name": "f"}], "tool_choice": {}, "thinking": {}}],
    "/tokenize": [{}, {"messages": [_PARTS], "tools": _TOOLS, **_OPENS}],
    "/detokenize": [{}],
    "/v1/load_lora_adapter": [{}],
    "/v1/unload_lora_adapter": [{}],
    "/v1/feedback": [{}],
}


def test_every_body_is_tried_here() -> None:
    described = {p for p, methods in DOCUMENT["paths"].items() for row in methods.values() if "requestBody" in row}
    assert described == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_described_is_what_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, set[str]] = {}

    def note(fields: Fields, *names: str) -> None:
        read.setdefault(re.sub(r"\[\d+]", "[]", fields.path), set()).update(names)

    raw, ignore = Fields.raw, Fields.ignore
    monkeypatch.setattr(Fields, "raw", lambda self, name: (note(self, name), raw(self, name))[1])
    monkeypatch.setattr(Fields, "ignore", lambda self, *names: (note(self, *names), ignore(self, *names))[1])
    async with http_front() as front:
        for body in BODIES[path]:
            data = request_bytes(path, json.dumps(body).encode(), front.key, "connection: close")
            assert (await front.raw(data))[9:12] in (b"400", b"200")
    assert read.keys() >= {""}
    for where, names in read.items():
        described: set[str] = set()
        for schema in at(body_of(path), where):
            described |= schema["properties"].keys()
        assert names <= described, (where, names - described)
        if not where:
            assert names == described, described - names


def body_of(path: str) -> Any:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def at(schema: Any, where: str) -> Iterator[Any]:
    """The objects that may stand there; `where` as `messages[].content[].`"""
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from at(each, where)
    elif not where:
        if "properties" in schema:
            yield schema
    elif where.startswith("["):
        if "items" in schema:
            yield from at(schema["items"], where[2:].removeprefix("."))
    elif "properties" in schema:
        name = re.split(r"[.\[]", where, maxsplit=1)[0]
        yield from at(schema["properties"].get(name, {}), where[len(name) :].removeprefix("."))
