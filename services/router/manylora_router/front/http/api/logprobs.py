"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manylora.v1 import common_pb2

from manylora_router.front.http.api.answers import Choice, Opened
from manylora_router.front.http.api.asked import Form
from manylora_router.text.service import TextService

_LEAST = -9999.0  # JSON has no infinity


class Logprobs:
    def __init__(self, text: TextService, form: Form) -> None:
        self._count = form.top_logprobs
        self._prompt_count = form.prompt_logprobs
        self._token: Callable[[int], str] = (
            (lambda token_id: f"token_id:{token_id}") if form.are_tokens_ids else text.token
        )

    def of_chat(self, piece: Choice) -> dict[str, Any]:
        return {"content": [self._position(*each) for each in _positions(piece)], "refusal": None}

    def of_completion(self, piece: Choice, echoed: Opened) -> dict[str, Any]:
        """echoed: the prompt where it stands before the piece; its first token has nothing before it."""
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._tell(told, echoed.token_ids[:1], [None], 0)
        first = sum(map(len, told["tokens"]))
        self._tell(told, echoed.token_ids[1:], echoed.logprobs, first)
        self._tell(told, piece.token_ids, piece.logprobs, piece.offset)
        return told

    def _tell(
        self,
        told: dict[str, Any],
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs | None],
        offset: int,
    ) -> None:
        for token_id, each in zip(token_ids, logprobs, strict=False):
            token = self._token(token_id)
            told["tokens"].append(token)
            told["token_logprobs"].append(None if each is None else _value(each.logprob))
            told["text_offset"].append(offset)
            offset += len(token)
            top = None
            if each is not None:
                top = {token: _value(each.logprob)}
                top |= {self._token(other.token_id): _value(other.logprob) for other in each.top[: self._count]}
            told["top_logprobs"].append(top)

    def of_prompt(self, prompt: Opened) -> list[dict[str, Any] | None]:
        """As vLLM tells them: by token id."""
        found: list[dict[str, Any] | None] = [None]
        for token_id, each in zip(prompt.token_ids[1:], prompt.logprobs, strict=False):
            entries = [(token_id, each.logprob, each.rank)]
            top = each.top[: self._prompt_count]
            entries += [(other.token_id, other.logprob, rank) for rank, other in enumerate(top, 1)]
            found.append({str(entry[0]): self._ranked(*entry) for entry in entries})
        return found

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _value(logprob), "rank": rank, "decoded_token": self._token(token_id)}

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
