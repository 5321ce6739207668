"""What a message's bytes tell before they are parsed (protobuf's wire format): what is too large, what too many."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from manylora_shared.errors import InvalidRequest

LARGE_BYTES = 32 * 1024  # a smaller message is parsed in less time than it is looked through
_MAX_LISTED = 1_000

Inner = Mapping[int, Any]  # descriptors, whose types differ by protobuf's build


def no_message(message_type: type[Message]) -> InvalidRequest:
    return InvalidRequest.of("request", f"the bytes received are not a {message_type.DESCRIPTOR.full_name} message")


def too_large(message_type: type[Message], data: bytes, max_bytes: int) -> InvalidRequest:
    """Names the largest field."""
    sizes: dict[int, int] = {}
    for number, size_bytes in _fields(data):
        sizes[number] = sizes.get(number, 0) + size_bytes
    largest = max(sizes, key=sizes.__getitem__, default=0)
    field = message_type.DESCRIPTOR.fields_by_number.get(largest)
    if field is None:
        return InvalidRequest.of("request", f"has {len(data)} bytes; it has at most {max_bytes}")
    return InvalidRequest.of(_name(field), f"has {sizes[largest]} bytes; a request has at most {max_bytes} in all")


def check_fields(message_type: type[Message], data: bytes, max_fields: int) -> None:
    """A field is two bytes, and up to a hundred once it is parsed. Those of strings and numbers in a message that has
    nothing else are not counted: they cost what their bytes do.

    Raises InvalidRequest where there are more, or the bytes are no message.
    """
    try:
        last = _last_field(message_type.DESCRIPTOR, data, max_fields)
    except IndexError:  # it is cut off
        raise no_message(message_type) from None
    if last is None:
        return
    field = message_type.DESCRIPTOR.fields_by_number.get(last)
    name = _name(field) if field is not None else "request"
    raise InvalidRequest.of(name, f"has too many parts; a request has at most {max_fields} in all")


def _last_field(descriptor: Any, data: bytes, max_fields: int) -> int | None:
    """The number of the field at the top in which they become more. Raises IndexError for what is no message."""
    around: list[tuple[int, Inner]] = []
    at, end, inner, top = 0, len(data), _counted(descriptor), 0
    for _ in range(max_fields + 1):
        while at >= end:
            if at > end:
                raise IndexError
            if not around:
                return None
            end, inner = around.pop()
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1)
        if not around:
            top = tag >> 3
        match tag & 7:
            case 2:
                size_bytes = data[at]
                at += 1
                if size_bytes > 127:
                    size_bytes, at = _varint(data, at - 1)
                if at + size_bytes > end:
                    raise IndexError
                if (found := inner.get(tag >> 3)) is None:
                    at += size_bytes
                else:
                    around.append((end, inner))
                    end, inner = at + size_bytes, _counted(found)
            case 0:
                _, at = _varint(data, at)
            case 5:
                at += 4
            case 1:
                at += 8
            case _:  # groups too: no message here has them
                raise IndexError
    return top


@functools.cache
def _counted(descriptor: Any) -> Inner:
    """The messages in it whose fields are counted too, by number."""
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None and any(map(_is_costly, field.message_type.fields))
    }


def _is_costly(field: Any) -> bool:
    return field.message_type is not None or bool(
        field.is_repeated and field.type in (field.TYPE_STRING, field.TYPE_BYTES)
    )


def _name(field: Any) -> str:
    oneof = field.containing_oneof
    return f"{oneof.name}.{field.name}" if oneof is not None else str(field.name)


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """Numbers of a message's first fields with their sizes in bytes."""
    at = 0
    for _ in range(_MAX_LISTED):
        if at >= len(data):
            return
        try:
            tag, at = _varint(data, at)
            match tag & 7:
                case 0:
                    _, end = _varint(data, at)
                case 1:
                    end = at + 8
                case 2:
                    size_bytes, at = _varint(data, at)
                    end = at + size_bytes
                case 5:
                    end = at + 4
                case _:
                    return
        except IndexError:
            return
        yield tag >> 3, min(end, len(data)) - at
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """And where it ends. Raises IndexError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
