"""What a caller has of its answer, and the request with which another router makes the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.grpc_transport import UNREACHABLE

from manylora.v1 import inference_pb2

_LOST = ("unavailable", UNREACHABLE, "draining")  # labels of UNAVAILABLE by which an answer's router is gone


@dataclass
class _Had:
    token_ids: list[int] = field(default_factory=list)
    characters: int = 0


class Progress:
    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self._token = ""
        self._next_frame = 0
        self._had = [_Had() for _ in range(max(1, request.n))]

    @property
    def can_go_on(self) -> bool:
        return bool(self._token)

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        self._next_frame = message.frame + 1
        if message.HasField("started"):
            self._token = message.started.resume_token
        if message.HasField("delta") and message.delta.choice < len(self._had):
            had = self._had[message.delta.choice]
            had.token_ids += message.delta.token_ids
            had.characters += len(message.delta.text)

    def request(self) -> inference_pb2.GenerateRequest:
        asked = inference_pb2.GenerateRequest()
        asked.CopyFrom(self._request)
        asked.resume.token, asked.resume.next_frame = self._token, self._next_frame
        for had in self._had:
            asked.resume.emitted.add(token_ids=had.token_ids, text_characters=had.characters)
        return asked


def is_lost(error: RpcError) -> bool:
    """The router, or the line to it, and not the request."""
    return error.code is Code.UNAVAILABLE and error.label in _LOST
