"""Calls that are JSON objects with a name and arguments, one or a list of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator

from manylora_router.dialect.json_scan import JsonScanner
from manylora_router.dialect.pieces import Output, Stream, Waiting

_ARGUMENTS = ("arguments", "parameters")


def arguments(stream: Stream, out: Output) -> Waiting:
    """An object, given as it comes; False: it broke, and what broke it stands in the stream."""
    if not ((yield from stream.reaches(0)) and stream.text[0] == "{"):
        return False
    scanner = JsonScanner()
    while True:
        out.arguments(stream.take(scanner.scan(stream.text)))
        if scanner.is_done:
            out.end()
            return True
        if stream.text or stream.is_over:
            return False
        yield


def json_calls(stream: Stream, out: Output, names: Collection[str], start: int) -> Waiting:
    """From `start` on, behind white space. False: nothing was taken. What is left follows the calls."""
    at = yield from stream.after_space(start)
    if not (yield from stream.has("[", at)):
        return (yield from json_call(stream, out, names, at))
    if not (yield from json_call(stream, out, names, at + 1)):
        return False
    while True:
        at = yield from stream.after_space(0)
        if (yield from stream.has("]", at)):
            stream.take(at + 1)
            return True
        if not ((yield from stream.has(",", at)) and (yield from json_call(stream, out, names, at + 1))):
            return True


def json_call(stream: Stream, out: Output, names: Collection[str], start: int) -> Waiting:
    """One, of a name that is known. True: it began, and is whole unless its arguments broke."""
    name, found = None, "{}"
    at = yield from stream.after_space(start)
    if not (yield from stream.has("{", at)):
        return False
    while True:
        key_at = yield from stream.after_space(at + 1)
        key_end = yield from value_end(stream, key_at, '"')
        at = yield from stream.after_space(key_end)
        if not key_end or not (yield from stream.has(":", at)):
            return False
        key = json.loads(stream.text[key_at:key_end])
        value_at = yield from stream.after_space(at + 1)
        if key in _ARGUMENTS and name is not None and (yield from stream.has("{", value_at)):
            out.begin(name, stream.take(value_at))
            if (yield from arguments(stream, out)):
                yield from _close(stream)
            return True
        end = yield from value_end(stream, value_at)
        value = stream.text[value_at:end]
        if key == "name":
            name = json.loads(value) if value.startswith('"') else None
            if name not in names:
                return False
        elif key in _ARGUMENTS:
            found = value
        at = yield from stream.after_space(end)
        if not end or not (yield from stream.reaches(at)) or stream.text[at] not in ",}":
            return False
        if stream.text[at] == "}":
            break
    if name is None or not found.startswith("{"):
        return False
    out.call(name, found, stream.take(at + 1))
    return True


def _close(stream: Stream) -> Generator[None]:
    """Takes the members behind the arguments, and the object's end: where there are none, nothing."""
    scanner = JsonScanner()
    scanner.scan('{"":[]')
    end = 0
    while not scanner.is_done:
        end = scanner.scan(stream.text, end)
        if scanner.is_done:
            break
        if end < len(stream.text) or stream.is_over:
            return
        yield
    stream.take(end)


def value_end(stream: Stream, start: int, first: str = "") -> Generator[None, None, int]:
    """Of a JSON value at `start`; 0: there is none, or it does not begin with `first`."""
    if not (yield from stream.has(first, start)):
        return 0
    scanner, end = JsonScanner(), start
    while True:
        end = scanner.scan(stream.text, end)
        if scanner.is_done:
            return end
        if end < len(stream.text) or stream.is_over:
            return 0
        yield
