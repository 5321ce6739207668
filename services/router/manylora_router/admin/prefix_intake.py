"""From what an operator declares public to the tokens that prompts begin with.

Owns no state. What is declared is the beginning of prompts, and how its end is tokenized depends on what follows: so it
is tokenized with two continuations, and what both begin with is the prefix. A prompt is read as a request's is
(admission.py), with the same bounds and the same names of fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from manylora.v1 import admin_pb2
from manylora_shared.errors import FieldViolation, InvalidRequest, ServiceUnavailable
from manylora_shared.ids import is_valid_name

from manylora_router.guard import admission
from manylora_router.guard.admission import ChatPrompt, Prompt, RequestInput, TextPrompt, TokenPrompt
from manylora_router.links.directory import Directory, Model
from manylora_router.text.service import TextService

MAX_TOKENS = 1 << 17
"""Of a prefix: its record is then well inside what etcd takes as a value, 1.5 MiB."""
_CONTINUATIONS = ("a", " b")


class PrefixIntake:
    def __init__(self, directory: Directory, text: TextService) -> None:
        self._directory = directory
        self._text = text

    async def read(self, request: admin_pb2.AddPublicPrefixRequest) -> tuple[Model, tuple[int, ...]]:
        """The model of the pool, and the prefix in its tokens.

        Raises:
            InvalidRequest: with all that is wrong.
            Unready: the router has no tokenizer, or the model no chat template.
            ServiceUnavailable: nothing is known of the model yet.
        """
        model = self._directory.model
        if model is None:
            raise ServiceUnavailable("no worker has registered yet", retry_after_s=1.0)
        prompt = _prompt_of(request)
        found = admission.check(RequestInput(prompt=prompt), model.limits)
        if not is_valid_name(request.name):
            found.append(FieldViolation("name", "is missing" if not request.name else "is not a valid name"))
        if found:
            raise InvalidRequest.of_all(found)
        assert prompt is not None
        token_ids = await self._tokenize(prompt)
        field, most = admission.prompt_field(prompt), min(model.limits.max_context_tokens - 1, MAX_TOKENS)
        if not token_ids:
            raise InvalidRequest.of(field, "prompts that begin with it have no token in common")
        if len(token_ids) > most:
            raise InvalidRequest.of(field, f"must be at most {most} tokens, not {len(token_ids)}")
        return model, token_ids

    async def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(ids):
                return tuple(ids)
            case TextPrompt(text):
                one, other = [await self._text.encode(text + more) for more in _CONTINUATIONS]
            case ChatPrompt(messages):
                one, other = [await self._text.encode_chat([*messages, ("user", more)]) for more in _CONTINUATIONS]
        return _common_prefix(one, other)


def _prompt_of(request: admin_pb2.AddPublicPrefixRequest) -> Prompt | None:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(request.token_ids.ids)
        case "chat":
            return ChatPrompt([(m.role, m.content) for m in request.chat.messages])
        case _:
            return None


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token_id for token_id, _ in both)
