"""POST /v1/responses, without a store: each request brings its whole conversation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manylora_shared.errors import ManyloraError

from manylora_router.dialect.blocks import Block, Kind
from manylora_router.dialect.dialect import Dialect
from manylora_router.front.http import errors
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door, resumed_part
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.constraints import read_format
from manylora_router.front.http.api.prompts import Conversation, each_of, read_effort, read_message, read_text
from manylora_router.front.http.api.telling import Told, event, tell
from manylora_router.front.http.api.tooling import Reading, read_arguments, read_tools
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import RequestInput

NOT_BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("previous_response_id", ()),
    ("conversation", ()),
    ("background", (False,)),
    ("prompt", ()),
    ("include", ([],)),
    ("top_logprobs", (0,)),
    ("truncation", ("disabled",)),
    ("context_management", ([],)),
    ("moderation", ()),
)
# of every response
_UNSAID: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
    "truncation": "disabled",
}
HARMLESS = ("max_tool_calls", "access_programs", "background_options", "image")
_BEGUN: dict[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
KINDS = ("input_text", "output_text", "text")
_NAMES = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text", Kind.CALL: "function_call_arguments"}
_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_IGNORED = ("type", "id", "status", "phase", "refusal", "annotations")


class _Errors(errors.ErrorForm):
    """An error in mid-stream is an event with a number."""

    def __init__(self, numbers: itertools.count[int]) -> None:
        self._numbers = numbers

    def event(self, error: ManyloraError, names: errors.Names) -> bytes:
        told = self.document(error, names)["error"]
        more = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return event({"type": "error", "sequence_number": next(self._numbers), **more})


async def respond(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    request, form, said, reading = _read(fields, exchange, door)
    numbers = itertools.count()
    exchange.form = _Errors(numbers)
    telling = _Response(form.model, request, said, door.now_unix_s, numbers, reading)
    await tell(door, exchange, request, telling, reading, is_stream=form.is_stream)


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form, dict[str, Any], Reading]:
    """And what the response repeats. Raises InvalidRequest."""
    instructions = fields.text("instructions")
    conversation = _conversation(fields, instructions, door.dialect)
    tools = read_tools(fields, door.dialect, is_flat=True)
    reading = Reading(door.dialect, tools, door.text, exchange.request_id)
    max_tokens = fields.integer("max_output_tokens", at_least=1)
    text = fields.inner("text")
    told_format, constraint = text.peek("format"), read_format(text, "format")
    text.ignore("verbosity")
    text.close()
    thinking = fields.inner("reasoning")
    effort = thinking.peek("effort")
    kwargs = read_effort(thinking, "effort", door.dialect)
    thinking.ignore("summary", "generate_summary")
    thinking.close()
    metadata = fields.members_of("metadata")
    for name, neutral in NOT_BUILT:
        fields.only(name, *neutral)
    fields.ignore(*HARMLESS)
    request, form = asked.read(
        fields, asked.caller_of(exchange.headers), door.names, max_tokens=max_tokens, top_logprobs=None
    )
    asked.refuse_untold(fields)
    fields.close()
    if constraint is not None and request.constraint is not None:
        fields.wrong("text.format", "is given beside another constraint: one is kept")
    exchange.names = {**form.names, **reading.names, "max_tokens": "max_output_tokens", "messages": "input"}
    fields.check()
    said = {
        "instructions": instructions or None,
        "metadata": metadata,
        "max_output_tokens": max_tokens,
        "reasoning": {"effort": effort, "summary": None},
        "parallel_tool_calls": tools.most_calls is None,
        "tool_choice": fields.peek("tool_choice") or "auto",
        "tools": [{"strict": None, "description": None, **tool} for tool in fields.peek("tools") or ()],
    }
    if constraint is not None:
        request = replace(request, constraint=constraint)
    name = "text.format" if request.constraint is None else form.names.get(request.constraint.field, "text.format")
    request = reading.asked(request, conversation.prompt(tools=tools.offered, template_kwargs=kwargs), name)
    if constraint is not None:
        said["text"] = {"format": told_format}
        exchange.names[constraint.field] = "text.format"
    return request, form, said, reading


def _conversation(fields: Fields, instructions: str, dialect: Dialect) -> Conversation:
    found = Conversation()
    if instructions:
        found.say("system", instructions)
    if isinstance(fields.peek("input"), str):
        found.say("user", fields.text("input"))
        return found
    thoughts: list[str] = []
    for item in each_of(fields, "input"):
        item.ignore(*_IGNORED)
        match item.peek("type") or "message":
            case "message":
                if item.peek("role") != "assistant":
                    _settle(found, thoughts)
                    thoughts = []
                read_message(item, found, KINDS, thoughts="\n".join(thoughts))
            case "function_call":
                if not _settle(found, thoughts):
                    found.say("assistant", "", reasoning="\n".join(thoughts))
                found.call(item.text("call_id"), item.text("name"), read_arguments(item))
                item.ignore("namespace", "caller")
                item.close()
            case "function_call_output":
                _settle(found, thoughts)
                found.result(item.text("call_id"), read_text(item, "output", KINDS))
                item.ignore("caller", "name")
                item.close()
            case "reasoning":
                item.ignore("summary", "encrypted_content")
                thoughts += [text] if (text := read_text(item, "content", ("reasoning_text",))) else []
                item.close()
                continue
            case _:
                item.wrong("type", "is none that is read here")
                break
        thoughts = []
    _settle(found, thoughts)
    found.fit(fields, "input", dialect)
    return found


def _settle(found: Conversation, thoughts: Sequence[str]) -> bool:
    """What was thought behind an answer's text is that answer's. Returns whether there is one: thoughts alone, of an
    answer that was cut, are no message."""
    is_answer = bool(found.messages) and found.messages[-1][0] == "assistant"
    if thoughts and is_answer:
        found.think("\n".join(thoughts))
    return is_answer


class _Response:
    """api.telling.Telling."""

    def __init__(
        self,
        model: str,
        request: RequestInput,
        said: Mapping[str, Any],
        now_unix_s: Callable[[], float],
        numbers: itertools.count[int],
        reading: Reading,
    ) -> None:
        self._now_unix_s = now_unix_s
        self._numbers = numbers
        self._reading = reading
        self._common = {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "created_at": int(now_unix_s()),
            "model": model,
            "error": None,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "presence_penalty": request.sampling.presence_penalty,
            "frequency_penalty": request.sampling.frequency_penalty,
            **_UNSAID,
            **said,
        }

    def begin(self, told: Told) -> bytes:
        begun = {**self._common, **_BEGUN}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def open(self, index: int, block: Block) -> bytes:
        item = self._item(index, Block(block.kind, name=block.name, number=block.number), "in_progress")
        part = [] if block.kind is Kind.CALL else item["content"]
        item |= {} if block.kind is Kind.CALL else {"content": []}
        place = self._place(index, block)
        return self._event("response.output_item.added", output_index=index, item=item) + b"".join(
            self._event("response.content_part.added", **place, part=each) for each in part
        )

    def delta(self, index: int, block: Block, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if block.kind is Kind.TEXT else {}
        return self._event(f"response.{_NAMES[block.kind]}.delta", **self._place(index, block), delta=text, **more)

    def close(self, index: int, block: Block) -> bytes:
        is_call = block.kind is Kind.CALL
        item, place = self._item(index, block, _status(block)), self._place(index, block)
        told = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
        more: dict[str, Any] = {"logprobs": []} if block.kind is Kind.TEXT else {}
        done = self._event(f"response.{_NAMES[block.kind]}.done", **place, **told, **more)
        if not is_call:
            done += self._event("response.content_part.done", **place, part=item["content"][0])
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def end(self, told: Told) -> bytes:
        whole = self.whole(told)
        return self._event(f"response.{whole['status']}", response=whole)

    def whole(self, told: Told) -> dict[str, Any]:
        status = "incomplete" if told.is_cut else "completed"
        usage, blocks = told.usage, told.blocks.all or [Block(Kind.TEXT)]
        last = len(blocks) - 1
        output = [
            self._item(index, block, status if index == last and block.kind is Kind.TEXT else _status(block))
            for index, block in enumerate(blocks)
        ]
        return {
            **self._common,
            "status": status,
            "completed_at": None if told.is_cut else int(self._now_unix_s()),
            "incomplete_details": {"reason": "max_output_tokens"} if told.is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                **resumed_part(usage.resumed),
            },
        }

    def _item_id(self, index: int, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._reading.request_id}" + (f"_{index}" if index else "")

    def _place(self, index: int, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(index, block), "output_index": index}
        return place if block.kind is Kind.CALL else {**place, "content_index": 0}

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        common = {"id": self._item_id(index, block), "status": status}
        match block.kind:
            case Kind.TEXT:
                return {**common, "type": "message", "role": "assistant", "content": [_part(block.text)]}
            case Kind.REASONING:
                content = [{"type": "reasoning_text", "text": block.text}]
                return {**common, "type": "reasoning", "summary": [], "content": content}
            case Kind.CALL:
                call_id = self._reading.call_id(0, block.number)
                told = {"type": "function_call", "call_id": call_id, "name": block.name, "arguments": block.text}
                return {**common, **told}

    def _event(self, name: str, /, **more: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **more})


def _status(block: Block) -> str:
    return "incomplete" if block.kind is Kind.CALL and not block.is_whole else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
