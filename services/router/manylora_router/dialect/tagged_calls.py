"""Qwen3-Coder's calls: tags around a function's name and each parameter's text, as the parameter's schema reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from manylora_router.dialect.json_calls import value_end
from manylora_router.dialect.json_scan import JsonScanner
from manylora_router.dialect.marked_arguments import IGNORED
from manylora_router.dialect.pieces import Output, Stream, Waiting
from manylora_router.dialect.schemas import Schema, closed, kinds_of, resolved
from manylora_router.dialect.writing import Marks, json_value, quoted

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME_CHARS = 256
_KNOWN = frozenset((*IGNORED, "$defs", "definitions", "$ref", "type", "properties", "required", "additionalProperties"))
_KEY = re.compile(r"[^<>\s](?:[^<>\n]{0,254}[^<>\s])?")
_WORDS = {"True": True, "False": False, "None": None}


def tagged_call(stream: Stream, out: Output, functions: Mapping[str, Schema]) -> Waiting:
    """One, whose begin is the stream's. False: nothing was taken."""
    at = yield from stream.after_space(len(_BEGIN))
    if not (yield from stream.has(_FUNCTION, at)):
        return False
    name, at = yield from _name(stream, at + len(_FUNCTION))
    if name not in functions:
        return False
    found: dict[str, Any] = {}
    while True:
        at = yield from stream.after_space(at)
        if (yield from stream.has(_FUNCTION_END, at)):
            break
        if not (yield from stream.has(_PARAMETER, at)):
            return False
        key, start = yield from _name(stream, at + len(_PARAMETER))
        branches = _branches_of(functions[name], key)
        end = yield from _end_of_value(stream, start, branches)
        if not key or end < 0:
            return False
        found[key] = _read(stream.text[start:end].removeprefix("\n").removesuffix("\n"), branches)
        at = end + len(_PARAMETER_END)
    at += len(_FUNCTION_END)
    after = yield from stream.after_space(at)
    if (yield from stream.has(_END, after)):
        at = after + len(_END)
    out.call(name, json.dumps(found, ensure_ascii=False), stream.take(at))
    return True


def _name(stream: Stream, start: int) -> Generator[None, None, tuple[str, int]]:
    """Up to the tag's end, and where that is; empty: there is none."""
    while (end := stream.text.find(">", start)) < 0:
        if stream.is_over or len(stream.text) - start > _MAX_NAME_CHARS:
            return "", start
        yield
    return stream.text[start:end].strip(), end + 1


def _end_of_value(stream: Stream, start: int, branches: Sequence[Schema]) -> Generator[None, None, int]:
    """Where the tag behind it stands, of which only JSON may have one in it; -1: nowhere."""
    if "string" not in _kinds(branches):
        at = yield from stream.after_space(start)
        at = yield from stream.after_space((yield from value_end(stream, at)))
        if at and (yield from stream.has(_PARAMETER_END, at)):
            return at
    while (end := stream.text.find(_PARAMETER_END, start)) < 0 and not stream.is_over:
        yield
    return end


def _read(text: str, branches: Sequence[Schema]) -> Any:
    """A string where the parameter takes one, else JSON, where it can be that."""
    kinds = _kinds(branches)
    if any(text in _options(branch) for branch in branches) or ("string" in kinds and text != "null"):
        return text
    if text == "null":
        return None if "null" in kinds or "string" not in kinds else text
    if text in _WORDS:
        return _WORDS[text]
    scanner, value = JsonScanner(), text.strip()
    is_whole = scanner.scan(value + " ") >= len(value) and scanner.is_done
    return json.loads(value) if is_whole else text


def _branches_of(function: Schema, key: str) -> list[Schema]:
    properties = function.get("properties")
    try:
        return _branches(properties.get(key) if isinstance(properties, dict) else None, function)
    except ValueError:
        return []


def _kinds(branches: Sequence[Schema]) -> set[str]:
    return {kind for branch in branches for kind in kinds_of(branch)}


def _options(schema: Schema) -> list[Any]:
    given = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return given if isinstance(given, list) else []


def _branches(schema: Any, root: Schema) -> list[Schema]:
    found = resolved(schema, root)
    given = found.get("anyOf")
    return [resolved(each, root) for each in given] if isinstance(given, list) else [found]


def tagged_arguments(name: str, schema: Schema, marks: Marks) -> Iterator[str]:
    root = closed(schema)
    root = {**root, **resolved(root, root)}
    if unknown := next((key for key in root if key not in _KNOWN), None):
        raise ValueError(f"{unknown}: is not supported")
    required, members = root.get("required", ()), []
    for index, (key, each) in enumerate(root.get("properties", {}).items()):
        if not _KEY.fullmatch(key):
            raise ValueError(f"properties.{key}: is no name that a tag can have")
        rule = f"{name}_{index}"
        yield f"{rule}: {quoted(f'{_PARAMETER}{key}>' + chr(10))} {rule}_value {quoted(chr(10))}"
        yield from _value_rules(f"{rule}_value", each, root, f"properties.{key}.")
        members.append(rule if key in required else f"{rule}?")
    yield f"{name}: {' '.join(members) or quoted('')}"


def _value_rules(name: str, schema: Any, root: Schema, path: str) -> Iterator[str]:
    """Of a parameter's text and the tag behind it."""
    branches = _branches(schema, root)
    if any("string" in kinds_of(each) and not _options(each) for each in branches):  # what else it is, is read as one
        branches = [each for each in branches if "string" in kinds_of(each) or kinds_of(each) == ["null"]]
    yield f"{name}: " + " | ".join(f"{name}_{index}" for index in range(len(branches)))
    for index, each in enumerate(branches):
        yield from _branch_rules(f"{name}_{index}", each, root, path)


def _branch_rules(name: str, schema: Schema, root: Schema, path: str) -> Iterator[str]:
    last = quoted("\n" + _PARAMETER_END)
    if options := _options(schema):
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in options]
        if any(_PARAMETER_END in text for text in texts):
            raise ValueError(f"{path}enum: has {_PARAMETER_END} in it")
        yield f"{name}: ({' | '.join(map(quoted, texts))}) {last}"
    elif "string" not in kinds_of(schema):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        yield f"{name}: {name}_json {last}"
        yield f"{name}_json: {json_value({**shared, **schema})}"
    elif "pattern" in schema:
        raise ValueError(f"{path}pattern: is not supported")
    elif "minLength" in schema or "maxLength" in schema:
        yield f"{name}: {name.upper()} {last}"
        yield f"{name.upper()}: /[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
    else:
        yield f"{name}[suffix={quoted(_PARAMETER_END)}]: /(?s:.*)/"
