"""What a worker and its engine's process say to one another, and how that goes over a socket.

Messages are pickled objects behind their length: both ends are the same worker, and of tenants' files only what has
been checked gets here.

    worker    WorkerConfig                  once
    engine    Built or Refused              once, when the model is loaded
    worker    Command, Check or Stop
    engine    EnginePost or Checked, Failed at last if the engine cannot go on
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora_worker.engine.counters import EngineStats
from manylora_worker.hosting.runtime import ModelInfo
from manylora_worker.weights.adapter_check import AdapterReport

RECEIVE_BYTES = 1 << 18
"""At a time."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Built:
    """The engine is there."""

    model: ModelInfo
    stats: EngineStats
    max_context_tokens: int
    """Of the base model, whatever the KV blocks hold: requests are bounded there as in the engine itself."""
    max_requests: int


@dataclass(frozen=True)
class Refused:
    """The model cannot be served with these settings, and why."""

    message: str


@dataclass(frozen=True)
class Check:
    """Of an adapter that is to be registered."""

    number: int
    folder: Path


@dataclass(frozen=True)
class Checked:
    number: int
    found: AdapterReport | str
    """A text: why it could not be checked."""


@dataclass(frozen=True)
class Stop:
    """What is left is aborted."""


@dataclass(frozen=True)
class Failed:
    """The engine is no more."""

    message: str


def packed(message: Any) -> bytes:
    """As it goes over the socket."""
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(pickled)) + pickled


class Unpacker:
    """Messages from the pieces that a socket gives."""

    def __init__(self) -> None:
        self._received = bytearray()

    def take(self, piece: bytes) -> list[Any]:
        """The messages that the piece completes."""
        received = self._received
        received += piece
        messages, start = [], 0
        while len(received) >= (body := start + _LENGTH.size):
            end = body + _LENGTH.unpack_from(received, start)[0]
            if len(received) < end:
                break
            with memoryview(received) as view:
                messages.append(pickle.loads(view[body:end]))
            start = end
        del received[:start]
        return messages
