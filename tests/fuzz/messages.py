"""Messages drawn from their descriptors, values at the bounds of their types among them; and bytes that are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_F = FieldDescriptor
_INTEGERS = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), (0, (1 << 32) - 1)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), (0, (1 << 64) - 1)),
}
_NUMBERS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-5, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "x",
    " ",
    "\0",
    "../..",
    "a/b",
    "é" * 40,
    "\U0001f600",
    "x" * 5000,
    "{}",
    "tenant_id: acme\n",
    "a@1:0.5+b",
)
_MAX_DEPTH = 6


class Drawing:
    """words: texts that mean something to the service; fixed: fields that always have a value, by full name."""

    def __init__(self, rng: random.Random, words: Sequence[str], fixed: dict[str, Callable[[], Any]]) -> None:
        self._rng = rng
        self._words = (*words, *_TEXTS)
        self._fixed = fixed

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        found = GetMessageClass(kind)()
        density = self._rng.choice((0.2, 0.6, 1.0))
        chosen = {each.name: self._rng.choice(each.fields).name for each in kind.oneofs}
        for field in kind.fields:
            of_other = field.containing_oneof is not None and chosen[field.containing_oneof.name] != field.name
            if of_other or depth > _MAX_DEPTH:
                continue
            if field.full_name in self._fixed:
                setattr(found, field.name, self._fixed[field.full_name]())
            elif self._rng.random() < density or field.containing_oneof is not None:
                self._fill(found, field, depth)
        return found

    def _fill(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        count = self._rng.choice((0, 1, 1, 2, 3, 40)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(message, field.name), field.message_type, depth)
        elif field.message_type is not None:
            for _ in range(count if depth < 3 else min(count, 1)):
                inner = self.message(field.message_type, depth + 1)
                if field.is_repeated:
                    getattr(message, field.name).append(inner)
                else:
                    getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._scalar(field) for _ in range(count))
        else:
            setattr(message, field.name, self._scalar(field))

    def _fill_map(self, entries: Any, kind: Descriptor, depth: int) -> None:
        value = kind.fields_by_name["value"]
        for _ in range(self._rng.choice((0, 1, 3))):
            key = self._scalar(kind.fields_by_name["key"])
            if value.message_type is not None:
                entries[key].CopyFrom(self.message(value.message_type, depth + 1))
            else:
                entries[key] = self._scalar(value)

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.type in _INTEGERS:
            low, high = _INTEGERS[field.type]
            return rng.choice((max(low, 0), 1, 2, 3, rng.randrange(300), low, high, high - 1))
        match field.type:
            case _F.TYPE_BOOL:
                return rng.random() < 0.5
            case _F.TYPE_ENUM:
                return rng.choice([each.number for each in field.enum_type.values] + [999])
            case _F.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 16, 300)))
            case _F.TYPE_STRING:
                return rng.choice(self._words)
            case _:
                return rng.choice((*_NUMBERS, rng.random()))


def broken(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Ways in which these are not what they were, or nothing at all."""
    at = rng.randrange(len(data) + 1)
    yield data[:at]
    yield data[:at] + rng.randbytes(3) + data[at + 3 :]
    yield data + data
    yield data[at:] + data[:at]
    yield rng.randbytes(rng.choice((1, 7, 100, 3000)))
    yield b"\x0a\xff\xff\xff\xff\x0f" + data  # a length beyond the end
    yield b"\x0b" * 5000  # groups in groups
    yield b"".join(bytes((0x0A, min(length, 127))) for length in range(200, 0, -1))  # nested
    yield data + b"\xfa\xff\xff\xff\x0f\x01\x00"  # an unknown field
