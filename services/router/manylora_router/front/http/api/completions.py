"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Answering, Choice, Door
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.logprobs import Logprobs
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields, is_token_ids, is_unicode
from manylora_router.guard.admission import Prompt, RequestInput, TextPrompt, TokenPrompt

MAX_PROMPTS = 64


async def complete(exchange: Exchange, door: Door) -> None:
    requests, form, echoes = _read(await door.read(exchange), exchange, door)
    echoed = [await _text_of(request.prompt, door) for request in requests] if echoes else []
    shape = TextShape(form, Logprobs(door.text, form), echoed, requests[0].n)
    await Answering(door, exchange, requests, form, shape).run()


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[list[RequestInput], Form, bool]:
    """And whether answers begin with their prompts. Raises InvalidRequest."""
    max_tokens = fields.integer("max_tokens", at_least=1)
    request, form = asked.read(
        fields,
        asked.caller_of(exchange.headers),
        door.intake.base_model,
        max_tokens=max_tokens,
        top_logprobs=asked.read_logprobs_count(fields, "logprobs"),
    )
    prompts = _prompts(fields, fields.flag("add_special_tokens", True), door.intake.max_context_tokens)
    echoes = fields.flag("echo")
    if echoes and form.has_logprobs:
        fields.wrong("logprobs", "of a prompt are not built: leave out echo, or logprobs")
    fields.only("suffix", "")
    fields.only("best_of", 1, request.n)
    fields.close()
    exchange.names = {**form.names, "top_logprobs": "logprobs"}
    fields.check()
    requests = [replace(request, prompt=prompt) for prompt in prompts]
    requests[0] = replace(requests[0], request_id=exchange.request_id)
    return requests, form, echoes


def _prompts(fields: Fields, add_special_tokens: bool, context: int) -> list[Prompt]:
    """A text, token ids, or a list of either. What is longer than the context is refused unread."""
    value = fields.raw("prompt")
    if isinstance(value, str) or (value and is_token_ids(value, context)):
        value = [value]
    if not isinstance(value, list) or not value:
        fields.wrong("prompt", "must be a text, a list of token ids, or a list of those")
        return []
    if len(value) > MAX_PROMPTS:
        fields.wrong("prompt", f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken at a time")
        return []
    found: list[Prompt] = []
    for index, each in enumerate(value):
        if isinstance(each, str) and is_unicode(each):
            found.append(TextPrompt(each, add_special_tokens))
        elif is_token_ids(each, context):
            found.append(TokenPrompt(each))
        else:
            fields.wrong(f"prompt[{index}]", "must be a text or a list of token ids")
            return []
    return found


async def _text_of(prompt: Prompt | None, door: Door) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(ids):
            return await door.text.decode(ids)
        case _:
            raise AssertionError("completions have no messages")


class TextShape:
    id_prefix = "cmpl-"
    whole_name = event_name = "text_completion"
    has_one_prompt = False

    def __init__(self, form: Form, logprobs: Logprobs, echoed: Sequence[str], n: int) -> None:
        """`echoed`: the prompts' texts, where answers begin with them."""
        self._form = form
        self._logprobs = logprobs
        self._echoed = echoed
        self._n = n

    def choice(self, index: int, choice: Choice, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        told = self.piece(index, choice)
        told["text"] = self._echo(index) + choice.text
        if self._form.has_token_ids:
            told["prompt_token_ids"] = list(prompt_token_ids)
        return told

    def piece(self, index: int, piece: Choice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs.of_completion(piece) if self._form.has_logprobs and piece.token_ids else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._form.has_token_ids:
            told["token_ids"] = list(piece.token_ids)
        return told

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Choice | dict[str, Any] | None:
        echoed = Choice(self._echo(index))
        if self._form.has_token_ids:
            return {**self.piece(index, echoed), "prompt_token_ids": list(prompt_token_ids)}
        return echoed if echoed.text else None

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""
