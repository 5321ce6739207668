"""What the HTTP front's bodies may have, as JSON Schema. Sampling, what is not built and what nobody reads come from
the tables that the handlers read; a test holds the rest against the fields that they ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from manylora_shared.constraints.constraint import MAX_CHOICES as MAX_ALTERNATIVES
from manylora_shared.sampling import MAX_TOP_LOGPROBS, PARAMETERS, Kind, Parameter

from manylora_router.front.http.api import asked, chat, messages, responses
from manylora_router.front.http.api.completions import MAX_PROMPTS
from manylora_router.front.http.api.prompts import EFFORT, EFFORTS
from manylora_router.front.http.api.tooling import MAX_TOOLS, NEUTRAL_OF_TOOLS, UNUSED_OF_TOOLS
from manylora_router.guard.admission import (
    MAX_CHAT_MESSAGES,
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_ANY: Schema = {"description": "Read by nobody."}
_FREE: Schema = {"type": ["object", "null"]}
_MAX_ID = (1 << 32) - 1


def closed(properties: Mapping[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    """An object with these members and no other."""
    found: dict[str, Any] = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**found, "required": [*required]} if required else found


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


def _list(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, "minItems": least}


def _texts(most: int) -> Schema:
    return {"anyOf": [{"type": ["string", "null"]}, _list({"type": "string"}, most)]}


def _only(*neutral: Any) -> Schema:
    return {"enum": [None, *neutral], "description": "Nothing else is built."}


def _parameter(row: Parameter) -> Schema:
    low, high = row.range.low, row.range.high
    bounds: dict[str, Any] = {"exclusiveMinimum" if row.range.is_open else "minimum": 0 if row.range.or_zero else low}
    if high != math.inf:
        bounds["maximum"] = high
    match row.kind:
        case Kind.NUMBER:
            schema: dict[str, Any] = {"type": ["number", "null"], **bounds}
        case Kind.COUNT if row.name == "seed":
            schema = dict(_integer(-(1 << 63), int(high)))
        case Kind.COUNT if row.name == "top_k":
            schema = dict(_integer(-1, int(high)))
        case Kind.COUNT:
            schema = dict(_integer(int(low), int(high)))
        case Kind.TOKENS:
            schema = dict(_optional(_list(_integer(0, _MAX_ID), row.max_entries)))
        case Kind.BIASES:
            names = {"pattern": "^[0-9]{1,9}$"}
            each = {"type": "number", **bounds}
            schema = {"type": ["object", "null"], "propertyNames": names, "additionalProperties": each}
        case Kind.WORDS:
            schema = dict(_texts(row.max_entries))
    return {**schema, "description": f"{row.meaning[0].upper()}{row.meaning[1:]}."}


def _not_built(table: Iterable[tuple[str, tuple[Any, ...]]]) -> dict[str, Schema]:
    return {name: _only(*neutral) for name, neutral in table}


def _harmless(names: Iterable[str]) -> dict[str, Schema]:
    return dict.fromkeys(names, _ANY)


_SAMPLING = {row.name: _parameter(row) for row in PARAMETERS if row.name not in ("top_logprobs", "prompt_logprobs")}
_LOGPROBS = _integer(0, MAX_TOP_LOGPROBS)
_JSON_SCHEMA: Schema = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_FORMAT_NAMES = {"name": _ANY, "description": _ANY, "strict": _ANY}
_OUTPUTS = closed(
    {
        "regex": _TEXT,
        "grammar": _TEXT,
        "json": _optional(_JSON_SCHEMA),
        "json_object": _FLAG,
        "choice": _optional(_list({"type": "string"}, MAX_ALTERNATIVES, 1)),
        "disable_fallback": _ANY,
        "disable_any_whitespace": _ANY,
        "disable_additional_properties": _only(False),
        "whitespace_pattern": _only(),
    }
)


def _format(is_flat: bool) -> Schema:
    of_schema = {"schema": _JSON_SCHEMA, **_FORMAT_NAMES}
    inner = of_schema if is_flat else {"json_schema": closed(of_schema, ("schema",))}
    plain = closed({"type": {"enum": ["text", "json_object"]}}, ("type",))
    schema = closed({"type": {"const": "json_schema"}, **inner}, ("type", "schema" if is_flat else "json_schema"))
    return {"anyOf": [plain, schema, {"type": "null"}]}


_STREAM = closed({"include_usage": _FLAG, "continuous_usage_stats": _FLAG, "include_obfuscation": _ANY})
COMMON: Mapping[str, Schema] = {
    "model": {
        **_TEXT,
        "description": "A base model's or a pool's name, an adapter of the key's tenant, or BASE:ADAPTER.",
    },
    "stream": _FLAG,
    "stream_options": _optional(_STREAM),
    "response_format": _format(is_flat=False),
    "structured_outputs": _optional(_OUTPUTS),
    **_SAMPLING,
    "stop": _texts(MAX_STOP_STRINGS),
    "stop_token_ids": _optional(_list(_integer(0, _MAX_ID), MAX_STOP_TOKEN_IDS)),
    "n": _integer(1, MAX_CHOICES),
    "priority": _integer(-MAX_PRIORITY, MAX_PRIORITY),
    "user": _TEXT,
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "include_stop_str_in_output": _FLAG,
    **_not_built(asked.NOT_BUILT.items()),
    **_harmless(asked.HARMLESS),
}

_TOKEN_IDS = _list({"type": "integer", "minimum": 0, "maximum": _MAX_ID}, 1 << 20, 1)
_PROMPTS = {
    "anyOf": [{"type": "string"}, _TOKEN_IDS, _list({"anyOf": [{"type": "string"}, _TOKEN_IDS]}, MAX_PROMPTS, 1)]
}
COMPLETION = closed(
    {
        **COMMON,
        "prompt": _PROMPTS,
        "max_tokens": _integer(0),
        "echo": _FLAG,
        "logprobs": _LOGPROBS,
        "prompt_logprobs": _LOGPROBS,
        "add_special_tokens": _FLAG,
        "suffix": _only(""),
        "best_of": {"type": ["integer", "null"], "description": "1, or n."},
    },
    ("prompt",),
)


def _parts(*kinds: str) -> Schema:
    marks = _harmless(("cache_control", "citations", "annotations", "logprobs"))
    return closed({"type": {"enum": [*kinds]}, "text": _TEXT, **marks}, ("type",))


def _said(*kinds: str) -> Schema:
    return {"anyOf": [_TEXT, _list(_parts(*kinds), MAX_CHAT_MESSAGES)]}


_EFFORT = {"enum": [*EFFORTS, None]}
_FUNCTION = closed({"name": {"type": "string"}, "arguments": {"type": "string"}}, ("name",))
_CALL = closed({"id": _TEXT, "type": _only("function"), "index": _ANY, "function": _FUNCTION}, ("function",))
_SPOKEN = {
    "role": {"type": "string"},
    "name": _TEXT,
    "tool_call_id": _TEXT,
    "reasoning_content": _TEXT,
    "reasoning": _TEXT,
    "tool_calls": _optional(_list(_CALL, MAX_TOOLS)),
    "function_call": _only(),
    "audio": _only(),
}
MESSAGE = closed({**_SPOKEN, "content": _said("text"), **_harmless(("refusal", "annotations"))}, ("role",))
_OFFERED = {"name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}, "description": _TEXT}
_TOOL_FUNCTION = closed({**_OFFERED, "parameters": _FREE, "strict": _FLAG}, ("name",))
_TOOLS = _optional(_list(closed({"type": _only("function"), "function": _TOOL_FUNCTION}, ("function",)), MAX_TOOLS))
_FLAT_TOOL = closed({"type": _only("function"), **_OFFERED, "parameters": _FREE, "strict": _FLAG}, ("name",))
_ASKED_TOOLS = {"tool_choice": _only("auto", "none"), "parallel_tool_calls": _FLAG}
_TEMPLATE = {
    "messages": _list(MESSAGE, MAX_CHAT_MESSAGES, 1),
    "continue_final_message": _FLAG,
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": _FREE,
    "tools": _TOOLS,
    **_ASKED_TOOLS,
}
CHAT = closed(
    {
        **COMMON,
        **_TEMPLATE,
        "max_completion_tokens": _integer(1),
        "max_tokens": _integer(1),
        "logprobs": _FLAG,
        "top_logprobs": _LOGPROBS,
        "prompt_logprobs": _LOGPROBS,
        "include_reasoning": _FLAG,
        EFFORT: _EFFORT,
        **_not_built(chat.NOT_BUILT),
    },
    ("messages",),
)

_ITEM = _harmless(("id", "status", "phase", "refusal", "annotations"))
_TYPED_CALL = {"type": {"const": "function_call"}, "call_id": _TEXT, "name": _TEXT, "arguments": {"type": "string"}}
_OUTPUT = {"type": {"const": "function_call_output"}, "call_id": _TEXT, "output": _said(*responses.KINDS)}
_REASONING = {"type": {"const": "reasoning"}, "content": _said("reasoning_text")}
_ITEMS = (
    closed({**_SPOKEN, "type": _only("message"), "content": _said(*responses.KINDS), **_ITEM}, ("role",)),
    closed({**_TYPED_CALL, "namespace": _ANY, "caller": _ANY, **_ITEM}, ("type",)),
    closed({**_OUTPUT, "name": _ANY, "caller": _ANY, **_ITEM}, ("type",)),
    closed({**_REASONING, "summary": _ANY, "encrypted_content": _ANY, **_ITEM}, ("type",)),
)
RESPONSE = closed(
    {
        **COMMON,
        **_not_built(asked.UNTOLD.items()),
        "input": {"anyOf": [{"type": "string"}, _list({"anyOf": [*_ITEMS]}, MAX_CHAT_MESSAGES, 1)]},
        "instructions": _TEXT,
        "max_output_tokens": _integer(1),
        "text": _optional(closed({"format": _format(is_flat=True), "verbosity": _ANY})),
        "reasoning": _optional(closed({"effort": _EFFORT, **_harmless(("summary", "generate_summary"))})),
        "tools": _optional(_list(_FLAT_TOOL, MAX_TOOLS)),
        **_ASKED_TOOLS,
        **_not_built(responses.NOT_BUILT),
        **_harmless(responses.HARMLESS),
        "metadata": _FREE,
    },
    ("input",),
)

_MARKS = _harmless(("cache_control", "citations"))
_BLOCKS = (
    closed({"type": {"const": "text"}, "text": _TEXT, **_MARKS}, ("type",)),
    closed({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _ANY, **_MARKS}, ("type",)),
    closed({"type": {"const": "redacted_thinking"}, "data": _ANY, **_MARKS}, ("type",)),
    closed(
        {"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": _FREE, "caller": _ANY, **_MARKS}, ("type",)
    ),
    closed(
        {
            "type": {"const": "tool_result"},
            "tool_use_id": _TEXT,
            "is_error": _FLAG,
            "content": _said("text"),
            **_MARKS,
        },
        ("type",),
    ),
)
_TURN = closed(
    {
        **_SPOKEN,
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, _list({"anyOf": [*_BLOCKS]}, MAX_CHAT_MESSAGES)]},
    },
    ("role",),
)
_ANTHROPIC_TOOL = closed(
    {
        "type": _only("custom"),
        **_OFFERED,
        "input_schema": _FREE,
        "strict": _FLAG,
        **_harmless(("cache_control", "eager_input_streaming")),
        **dict.fromkeys(UNUSED_OF_TOOLS, _only(*NEUTRAL_OF_TOOLS)),
    },
    ("name",),
)
_CONVERSATION = {
    "system": _said("text"),
    "messages": _list(_TURN, MAX_CHAT_MESSAGES, 1),
    "tools": _optional(_list(_ANTHROPIC_TOOL, MAX_TOOLS)),
    "tool_choice": _optional(closed({"type": _only("auto", "none"), "disable_parallel_tool_use": _FLAG})),
    "thinking": _optional(
        closed({"type": {"enum": ["enabled", "adaptive", "disabled"]}, "budget_tokens": _ANY, "display": _ANY})
    ),
    **_not_built(messages.NOT_BUILT),
    **_harmless(messages.HARMLESS),
}
ANTHROPIC = closed(
    {
        **COMMON,
        **_not_built(asked.UNTOLD.items()),
        **_CONVERSATION,
        "max_tokens": {"type": "integer", "minimum": 1},
        "stop_sequences": _texts(MAX_STOP_STRINGS),
    },
    ("max_tokens", "messages"),
)
COUNT = closed({"model": _TEXT, **_CONVERSATION}, ("messages",))

TOKENIZE = closed(
    {"model": _TEXT, "prompt": _TEXT, **_TEMPLATE, "add_special_tokens": _FLAG, "return_token_strs": _FLAG}
)
DETOKENIZE = closed({"model": _TEXT, "tokens": _optional(_list(_integer(0, _MAX_ID), 1 << 20))})
FEEDBACK = closed(
    {
        "request_id": {
            "type": "string",
            "minLength": 1,
            "description": "Of the answer: its id, or x-manylora-request-id.",
        },
        "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "thumb": {"enum": ["up", "down", "", None], "description": "In the score's place."},
    },
    ("request_id",),
)
LOAD = closed(
    {
        "lora_name": {"type": "string", "minLength": 1},
        "lora_path": {"type": "string", "minLength": 1, "description": "An address, or a path in the adapter store."},
        "load_inplace": _only(False),
        "is_3d_lora_weight": _only(False),
        "base_model_name": _ANY,
    },
    ("lora_name", "lora_path"),
)
UNLOAD = closed({"lora_name": {"type": "string", "minLength": 1}, "lora_int_id": _ANY}, ("lora_name",))
USAGE = {
    "tenant": "the tenant; an operator's key without one sees all",
    "by": "what is summed by, with commas: tenant, adapter, version, class, key, pool, model, outcome, day, month; "
    "total: one sum; none: a row a request",
    "since": "ends from then on: 2026-11-25, 2026-11-25T12:00:00Z or Unix seconds",
    "until": "ends before then",
    "after": "the last page's `after`",
    "limit": "rows of a page, at most 1000",
}
