"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manylora.v1 import common_pb2

from manylora_router.front.http.api.answers import Choice
from manylora_router.front.http.api.asked import Form
from manylora_router.text.service import TextService

_LEAST = -9999.0  # JSON has no infinity


class Logprobs:
    def __init__(self, text: TextService, form: Form) -> None:
        self._count = form.top_logprobs
        self._token: Callable[[int], str] = (
            (lambda token_id: f"token_id:{token_id}") if form.are_tokens_ids else text.token
        )

    def of_chat(self, piece: Choice) -> dict[str, Any]:
        return {"content": [self._position(*each) for each in _positions(piece)], "refusal": None}

    def of_completion(self, piece: Choice) -> dict[str, Any]:
        tokens = [self._token(token_id) for token_id in piece.token_ids]
        offsets = []
        offset = piece.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_value(each.logprob) for each in piece.logprobs],
            "top_logprobs": [
                {
                    self._token(top.token_id): _value(top.logprob)
                    for top in [
                        common_pb2.TokenLogprob(token_id=token_id, logprob=each.logprob),
                        *each.top[: self._count],
                    ]
                }
                for token_id, each in _positions(piece)
            ],
            "text_offset": offsets,
        }

    def _position(self, token_id: int, found: common_pb2.PositionLogprobs) -> dict[str, Any]:
        top = [self._one(each.token_id, each.logprob) for each in found.top[: self._count]]
        return {**self._one(token_id, found.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        return {"token": token, "logprob": _value(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def _positions(piece: Choice) -> Sequence[tuple[int, common_pb2.PositionLogprobs]]:
    return list(zip(piece.token_ids, piece.logprobs, strict=False))


def _value(logprob: float) -> float:
    return max(_LEAST, logprob)
