"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manylora_router.dialect.blocks import Block, Blocks, Kind
from manylora_router.dialect.dialect import AnswerReader
from manylora_router.dialect.pieces import CallBegin, Piece
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Answering, Choice, Door, Opened
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.logprobs import Logprobs
from manylora_router.front.http.api.prompts import EFFORT, chat_prompt, read_effort
from manylora_router.front.http.api.tooling import Reading, read_tools
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import RequestInput

NOT_BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("functions", ([],)),
    ("function_call", ("none", "auto")),
    ("modalities", (["text"],)),
    ("audio", ()),
    ("prediction", ()),
    ("web_search_options", ()),
    ("moderation", ()),
    ("documents", ([],)),
    ("chat_template", ()),
    ("add_special_tokens", (False,)),
    ("echo", (False,)),
)


async def chat(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    request, form, reading = _read(fields, exchange, door)
    await Answering(door, exchange, [request], form, ChatShape(form, Logprobs(door.text, form), reading)).run()


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form, Reading]:
    """Raises InvalidRequest."""
    max_tokens = fields.integer("max_completion_tokens", at_least=1)
    older = fields.integer("max_tokens", at_least=1)
    request, form = asked.read(
        fields,
        asked.caller_of(exchange.headers),
        door.names,
        max_tokens=max_tokens if max_tokens is not None else older,
        top_logprobs=_top_logprobs(fields),
    )
    form = replace(form, prompt_logprobs=asked.read_prompt_logprobs(fields, form))
    tools = read_tools(fields, door.dialect)
    prompt = chat_prompt(fields, door.dialect, tools)
    if effort := read_effort(fields, EFFORT, door.dialect):
        prompt = replace(prompt, template_kwargs={**effort, **prompt.template_kwargs})
    reading = Reading(
        door.dialect, tools, door.text, exchange.request_id, tells_reasoning=fields.flag("include_reasoning", True)
    )
    for name, neutral in NOT_BUILT:
        fields.only(name, *neutral)
    fields.close()
    exchange.names = {**form.names, **reading.names}
    exchange.names |= {"max_tokens": "max_completion_tokens"} if max_tokens is not None else {}
    fields.check()
    sampling = replace(request.sampling, prompt_logprobs=form.prompt_logprobs)
    request = replace(request, sampling=sampling, is_movable=reading.is_plain)
    return reading.asked(request, prompt), form, reading


def _top_logprobs(fields: Fields) -> int | None:
    wants, count = fields.flag("logprobs"), asked.read_logprobs_count(fields, "top_logprobs")
    if count and not wants:
        fields.wrong("top_logprobs", "needs logprobs: true")
    return (count or 0) if wants else None


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_name = "chat.completion"
    event_name = "chat.completion.chunk"

    def __init__(self, form: Form, logprobs: Logprobs, reading: Reading) -> None:
        self._form = form
        self._logprobs = logprobs
        self._reading = reading
        self.is_plain = reading.is_plain
        self._streams: dict[int, tuple[AnswerReader, Blocks]] = {}

    def offset(self, index: int) -> int:
        return 0

    def document(self, prompt: Opened) -> dict[str, Any]:
        told: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)} if self._form.has_token_ids else {}
        if self._form.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._logprobs.of_prompt(prompt)
        return told

    def choice(self, index: int, choice: Choice, prompt: Opened) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
        if not self.is_plain:
            reader = self._reading.reader(prompt.token_ids)
            blocks = Blocks([*reader.push(choice.text), *reader.finish()]).settled()
            calls = [self._call(index, block) for block in blocks.of(Kind.CALL)]
            message["content"] = blocks.text_of(Kind.TEXT) or (None if calls else "")
            message |= {"tool_calls": calls} if calls else {}
            if self._reading.tells_reasoning and (reasoning := blocks.text_of(Kind.REASONING)):
                message["reasoning_content"] = reasoning
            self._end(choice, blocks)
        return {"index": index, "message": message, **self._more(choice)}

    def piece(self, index: int, piece: Choice) -> dict[str, Any] | None:
        is_end = piece.finish_reason is not None
        if self.is_plain:
            return {
                "index": index,
                "delta": {} if is_end and not piece.text else {"content": piece.text},
                **self._more(piece),
            }
        reader, blocks = self._streams[index]
        pieces = [*reader.push(piece.text), *(reader.finish() if is_end else ())]
        delta = self._delta(index, blocks, pieces)
        if is_end:
            self._end(piece, blocks)
        has_more = piece.token_ids and (self._form.has_logprobs or self._form.has_token_ids)
        return {"index": index, "delta": delta, **self._more(piece)} if delta or is_end or has_more else None

    def opening(self, index: int, prompt: Opened) -> dict[str, Any] | None:
        if not self.is_plain:
            self._streams[index] = self._reading.reader(prompt.token_ids), Blocks()
        return {"index": index, "delta": {"role": "assistant", "content": ""}, **self._more(Choice())}

    def _delta(self, index: int, blocks: Blocks, pieces: Sequence[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            text, block = blocks.add(piece), blocks.all[-1]
            if block.kind is Kind.CALL:
                if isinstance(piece, CallBegin):
                    calls[block.number] = {"index": block.number, **self._call(index, block)}
                elif text:
                    call = calls.setdefault(block.number, {"index": block.number, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
            elif block.kind is Kind.TEXT or self._reading.tells_reasoning:
                name = "content" if block.kind is Kind.TEXT else "reasoning_content"
                delta[name] = delta.get(name, "") + text
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def _call(self, index: int, block: Block) -> dict[str, Any]:
        function = {"name": block.name, "arguments": block.text}
        return {"id": self._reading.call_id(index, block.number), "type": "function", "function": function}

    def _end(self, choice: Choice, blocks: Blocks) -> None:
        # OpenAI's is `stop` where the request names the function.
        if choice.finish_reason == "stop" and blocks.has_whole_calls and not self._reading.tools.is_named:
            choice.finish_reason = "tool_calls"

    def _more(self, piece: Choice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "logprobs": self._logprobs.of_chat(piece) if self._form.has_logprobs and piece.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._form.has_token_ids:
            told["token_ids"] = list(piece.token_ids)
        return told
