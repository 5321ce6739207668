"""The bytes of a write-ahead log's segment: frames with their length and check, until the first that is not whole.

A segment is made of zeros, so the end of what was written reads as a frame of no bytes. A seal may change what is in a
frame (encryption at rest), never how frames follow one another.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

_HEAD = struct.Struct("<II")  # length, crc32
HEAD_BYTES = _HEAD.size
MAX_FRAME_BYTES = 1 << 20
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


class Seal(Protocol):
    """What stands between the ledger's records and the disk."""

    def close(self, plain: bytes) -> bytes: ...

    def open(self, sealed: bytes) -> bytes:
        """Raises ValueError."""
        ...


class NoSeal:
    def close(self, plain: bytes) -> bytes:
        return plain

    def open(self, sealed: bytes) -> bytes:
        return sealed


@dataclass(frozen=True, slots=True)
class Read:
    record: Any  # None: its kind was not asked for
    end: int  # of its frame, in the segment


def frame(record: Any, seal: Seal) -> bytes:
    """A record is what JSON has."""
    body = seal.close(_ENCODE(record).encode())
    assert len(body) <= MAX_FRAME_BYTES
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def records(data: bytes, seal: Seal, kinds: str = "") -> Iterator[Read]:
    """Up to the end of what was written whole. kinds: the first letters of records to read; empty: all."""
    at = 0
    while at + HEAD_BYTES <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        end = at + HEAD_BYTES + length
        if length == 0 or length > MAX_FRAME_BYTES or end > len(data):
            return
        body = data[at + HEAD_BYTES : end]
        if zlib.crc32(body) != check:
            return
        try:
            plain = seal.open(body)
            record = json.loads(plain) if not kinds or plain[2:3].decode() in kinds else None
        except ValueError:
            return
        yield Read(record, end)
        at = end


def is_torn(data: bytes, end: int) -> bool:
    """Something was begun behind the last whole frame."""
    return any(data[end : end + MAX_FRAME_BYTES])
