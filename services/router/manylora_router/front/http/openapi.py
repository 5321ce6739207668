"""The HTTP front's OpenAPI document, `/openapi.json`: a row for each route. A test holds it against the routes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from manylora_shared.metadata import (
    ADAPTER_KEY,
    CLASS_KEY,
    CONVERSATION_KEY,
    IDEMPOTENCY_KEY,
    KEEP_KEY,
    LAST_EVENT_ID,
    PRIORITY_KEY,
    TENANT_KEY,
    TRACEPARENT_KEY,
    USER_KEY,
)

from manylora_router.front.http import schemas
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.exchange import Exchange, encoded

PATH = "/openapi.json"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"
_HEADERS = {
    TENANT_KEY: "the tenant, with a gateway's or an operator's key",
    ADAPTER_KEY: "the adapter, in place of `model`",
    CLASS_KEY: "the request's class",
    PRIORITY_KEY: "within its tenant and class; higher is sooner",
    CONVERSATION_KEY: "who keeps an adapter's version in a rollout",
    USER_KEY: "the same",
    IDEMPOTENCY_KEY: "a request that is sent again gets the first one's answer",
    KEEP_KEY: "how many seconds a stream goes on without its caller, who comes back with `last-event-id`",
    LAST_EVENT_ID: "the `id` of the last event that came: the same request gets those behind it, at any router",
    TRACEPARENT_KEY: "W3C trace context",
    "x-request-id": "what the answer repeats",
}
_BODIES = {
    "CompletionRequest": schemas.COMPLETION,
    "ChatCompletionRequest": schemas.CHAT,
    "ResponseRequest": schemas.RESPONSE,
    "MessageRequest": schemas.ANTHROPIC,
    "CountTokensRequest": schemas.COUNT,
    "TokenizeRequest": schemas.TOKENIZE,
    "DetokenizeRequest": schemas.DETOKENIZE,
    "FeedbackRequest": schemas.FEEDBACK,
    "LoadAdapterRequest": schemas.LOAD,
    "UnloadAdapterRequest": schemas.UNLOAD,
}


def _told(**members: str) -> dict[str, Any]:
    """An object that has at least these."""
    return {"type": "object", "properties": {n: {"type": t} for n, t in members.items()}, "required": [*members]}


_DESCRIBED = {"message": {"type": "string"}, "type": {"type": "string"}}
_ANSWERS = {
    "Empty": {"type": "object"},
    "Completion": _told(
        id="string", object="string", created="integer", model="string", choices="array", usage="object"
    ),
    "Response": _told(
        id="string", object="string", created_at="integer", model="string", output="array", usage="object"
    ),
    "Message": _told(id="string", type="string", role="string", model="string", content="array", usage="object"),
    "TokenCount": _told(input_tokens="integer"),
    "Tokens": _told(count="integer", max_model_len="integer", tokens="array"),
    "Text": _told(prompt="string"),
    "Feedback": _told(object="string", request_id="string", score="number", counted="boolean"),
    "TokenizerInfo": _told(model_max_length="integer"),
    "Models": _told(object="string", data="array"),
    "Model": _told(id="string", object="string", created="integer", owned_by="string"),
    "Version": _told(version="string"),
    "Usage": _told(object="string", data="array"),
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {**_DESCRIBED, "param": {"type": ["string", "null"]}, "code": {"type": "string"}},
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "MessageError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "properties": _DESCRIBED, "required": ["message", "type"]},
        },
        "required": ["type", "error"],
    },
}


@dataclass(frozen=True)
class Operation:
    summary: str
    answer: str  # of _ANSWERS; empty: text
    body: str = ""  # of _BODIES
    needs_key: bool = True
    has_events: bool = False
    error: str = "Error"
    query: Mapping[str, str] = field(default_factory=dict)  # its fields, and what they say

    def document(self, parameters: list[dict[str, Any]]) -> dict[str, Any]:
        content = {_JSON: {"schema": _ref(self.answer)}} if self.answer else {_TEXT: {"schema": {"type": "string"}}}
        if self.has_events:
            content[_EVENTS] = {"schema": {"type": "string"}}
        responses = {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "Refused, or failed.", "content": {_JSON: {"schema": _ref(self.error)}}},
        }
        found: dict[str, Any] = {"summary": self.summary, "responses": responses}
        parameters = parameters + [_in("query", name, text) for name, text in self.query.items()]
        if self.needs_key:
            parameters = parameters + [_in("header", name, text) for name, text in _HEADERS.items()]
            found["security"] = [{"key": []}]
        if parameters:
            found["parameters"] = parameters
        if self.body:
            found["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(self.body)}}}
        return found


_ALIVE = Operation("Whether the process lives", "Empty", needs_key=False)
OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "/health": {"get": _ALIVE},
    "/ping": {"get": _ALIVE, "post": _ALIVE},
    "/ready": {"get": Operation("Whether a request would be taken", "Empty", needs_key=False)},
    "/version": {"get": Operation("The router's version", "Version", needs_key=False)},
    PATH: {"get": Operation("This document", "Empty", needs_key=False)},
    "/v1/completions": {
        "post": Operation("A text's continuation", "Completion", "CompletionRequest", has_events=True),
    },
    "/v1/chat/completions": {
        "post": Operation("A conversation's next message", "Completion", "ChatCompletionRequest", has_events=True),
    },
    "/v1/responses": {
        "post": Operation("OpenAI's responses, without a store", "Response", "ResponseRequest", has_events=True),
    },
    "/v1/messages": {
        "post": Operation("Anthropic's messages", "Message", "MessageRequest", has_events=True, error="MessageError"),
    },
    "/v1/messages/count_tokens": {
        "post": Operation("A conversation's tokens", "TokenCount", "CountTokensRequest", error="MessageError"),
    },
    "/v1/feedback": {"post": Operation("A score for an earlier answer", "Feedback", "FeedbackRequest")},
    "/tokenize": {"post": Operation("A text's or conversation's tokens", "Tokens", "TokenizeRequest")},
    "/detokenize": {"post": Operation("Tokens' text", "Text", "DetokenizeRequest")},
    "/tokenizer_info": {"get": Operation("Special tokens and chat template", "TokenizerInfo")},
    "/v1/models": {"get": Operation("The base model and the caller's adapters", "Models")},
    "/v1/models/{id}": {"get": Operation("One of them", "Model")},
    "/v1/load_lora_adapter": {"post": Operation("Adds an adapter, as in vLLM", "", "LoadAdapterRequest")},
    "/v1/unload_lora_adapter": {"post": Operation("Removes one", "", "UnloadAdapterRequest")},
    "/v1/usage": {"get": Operation("What requests have used, by row or summed", "Usage", query=schemas.USAGE)},
    "/metrics": {"get": Operation("Prometheus' text, for operators", "")},
}


@functools.cache
def document() -> Mapping[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "manylora", "version": version("manylora")},
        "paths": {
            path: {method: row.document(_path_parameters(path)) for method, row in rows.items()}
            for path, rows in OPERATIONS.items()
        },
        "components": {
            "schemas": {**_BODIES, **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


async def describe(exchange: Exchange, door: Door) -> None:
    await exchange.answer_bytes(_body(), "application/json")  # it is open to everybody, and long


@functools.cache
def _body() -> bytes:
    return encoded(document())


def _path_parameters(path: str) -> list[dict[str, Any]]:
    named = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return [named] if "{id}" in path else []


def _in(place: str, name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "description": text, "schema": {"type": "string"}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
