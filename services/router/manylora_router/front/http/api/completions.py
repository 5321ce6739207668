"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Answering, Choice, Door, Opened
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.logprobs import Logprobs
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields, is_token_ids, is_unicode
from manylora_router.guard.admission import Prompt, RequestInput, TextPrompt, TokenPrompt

MAX_PROMPTS = 64


async def complete(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    requests, form, echoes = _read(fields, exchange, door)
    echoed = [await _text_of(request, exchange, door) for request in requests] if echoes else []
    shape = TextShape(form, Logprobs(door.text, form), echoed, requests[0].n)
    await Answering(door, exchange, requests, form, shape).run()


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[list[RequestInput], Form, bool]:
    """And whether answers begin with their prompts. Raises InvalidRequest."""
    echoes = fields.flag("echo")
    max_tokens = fields.integer("max_tokens", at_least=0 if echoes else 1)
    request, form = asked.read(
        fields,
        asked.caller_of(exchange.headers),
        door.names,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        top_logprobs=asked.read_logprobs_count(fields, "logprobs"),
    )
    prompts = _prompts(fields, fields.flag("add_special_tokens", True), door.longest_context_tokens)
    told = asked.read_prompt_logprobs(fields, form)
    form = replace(form, prompt_logprobs=told, has_output=max_tokens != 0)
    fields.only("suffix", "")
    fields.only("best_of", *sorted({1, request.n}))
    fields.close()
    exchange.names = {**form.names, "top_logprobs": "logprobs"}
    fields.check()
    if echoes and form.has_logprobs:
        if told is None:
            exchange.names["prompt_logprobs"] = "logprobs"
        told = max(form.top_logprobs, told or 0)
        # lm-eval cuts the one token behind the prompt off, whatever it is: it has to be there.
        request = replace(request, ignore_eos=request.ignore_eos or request.max_tokens == 1)
    sampling = replace(request.sampling, prompt_logprobs=told)
    requests = [replace(request, prompt=prompt, sampling=sampling, is_movable=not echoes) for prompt in prompts]
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


async def _text_of(request: RequestInput, exchange: Exchange, door: Door) -> str:
    match request.prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(ids) if len(ids) > door.longest_context_tokens:
            return ""  # not looked at whole, and refused with its length
        case TokenPrompt(ids):
            async with door.intake.text_turn((exchange.tenant, request.qos_class), len(ids)):
                return await door.text.decode(ids)
        case _:
            raise AssertionError("completions have no messages")


class TextShape:
    id_prefix = "cmpl-"
    whole_name = event_name = "text_completion"
    is_plain = True

    def __init__(self, form: Form, logprobs: Logprobs, echoed: Sequence[str], n: int) -> None:
        """`echoed`: the prompts' texts, where answers begin with them."""
        self._form = form
        self._logprobs = logprobs
        self._echoed = echoed
        self._n = n

    def offset(self, index: int) -> int:
        return len(self._echo(index))

    def document(self, prompt: Opened) -> dict[str, Any]:
        return {}

    def choice(self, index: int, choice: Choice, prompt: Opened) -> dict[str, Any]:
        told = self._with_prompt(self._piece(index, choice, prompt), prompt)
        told["text"] = self._echo(index) + choice.text
        if self._form.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._logprobs.of_prompt(prompt)
        return told

    def piece(self, index: int, piece: Choice) -> dict[str, Any]:
        return self._piece(index, piece, Opened())

    def opening(self, index: int, prompt: Opened) -> dict[str, Any] | None:
        if not (self._echoed or self._form.has_token_ids):
            return None
        return self._with_prompt(self._piece(index, Choice(self._echo(index)), prompt), prompt)

    def _with_prompt(self, told: dict[str, Any], prompt: Opened) -> dict[str, Any]:
        return {**told, "prompt_token_ids": list(prompt.token_ids)} if self._form.has_token_ids else told

    def _piece(self, index: int, piece: Choice, prompt: Opened) -> dict[str, Any]:
        echoed = prompt if self._echoed and self._form.has_logprobs else Opened()
        has_logprobs = self._form.has_logprobs and (piece.token_ids or echoed.token_ids)
        told: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs.of_completion(piece, echoed) if has_logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._form.has_token_ids:
            told["token_ids"] = list(piece.token_ids)
        return told

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""
