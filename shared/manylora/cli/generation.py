"""`manylora generate`: streams one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from manylora_shared.errors import NoChatTemplate

from manylora.cli.output import EXIT_FAILED, Target, print_json, report, say, usage_error, write
from manylora.client import Choice, Constraint, Delta, GenerateStream, RequestFailed, Result, Sampling
from manylora.client.prompts import Prompt

NO_CHAT_TEMPLATE = NoChatTemplate.label.upper()


def prompts(argument: str, system: str | None, prefill: str | None, *, is_raw: bool, is_chat: bool) -> list[Prompt]:
    """Each is sent where the model has no chat template for the one before."""
    text = sys.stdin.read() if argument == "-" else argument
    if is_raw:
        return [text]
    turns = (("system", system), ("user", text), ("assistant", prefill))
    chat = [{"role": role, "content": content} for role, content in turns if content is not None]
    return [chat] if is_chat or len(chat) > 1 else [chat, text]


def template_kwargs(entries: Iterable[str]) -> dict[str, Any]:
    """What is no JSON is text."""
    found: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise usage_error(f"--template-kwarg: {entry!r} is not NAME=JSON")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


async def generate(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    tenant: str,
    adapter: str,
    model: str,
    qos_class: str,
    priority: int | None,
    user: str,
    conversation: str,
    timeout_s: float | None,
    max_tokens: int,
    sampling: Sampling,
    constraint: Constraint | None,
    stop: Sequence[str],
    n: int,
    continue_final_message: bool,
    chat_template_kwargs: dict[str, Any],
    as_json: bool,
) -> None:
    async with target.client(tenant=tenant) as client:
        for number, prompt in enumerate(prompts, 1):
            stream = client.generate(
                prompt,
                adapter=adapter,
                model=model,
                qos_class=qos_class,
                priority=priority,
                user=user,
                conversation=conversation,
                timeout_s=timeout_s,
                max_tokens=max_tokens,
                sampling=sampling,
                constraint=constraint,
                stop=stop,
                n=n,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs if not isinstance(prompt, str) else None,
            )
            try:
                await _stream(stream, is_one=n == 1, as_json=as_json)
                return
            except RequestFailed as error:
                if error.reason != NO_CHAT_TEMPLATE or number == len(prompts):
                    partial = {} if error.result is None else {"partial": error.result.to_json()}
                    report(error, as_json=as_json, others=partial)
                    raise typer.Exit(EXIT_FAILED) from None


async def _stream(stream: GenerateStream, *, is_one: bool, as_json: bool) -> None:
    try:
        async with stream:
            async for event in stream:
                if is_one and isinstance(event, Delta) and event.text:
                    _show(event.text, as_json=as_json)
    except RequestFailed as error:
        if error.result is not None:
            _close(error.result, is_one=is_one, as_json=as_json)
        raise
    _end(stream.result(), is_one=is_one, as_json=as_json)


def _show(text: str, *, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        write(text)


def _close(result: Result, *, is_one: bool, as_json: bool) -> None:
    """Several choices come mixed: they are shown when all is there."""
    if is_one:
        if result.text:
            _show("\n", as_json=as_json)
        return
    for number, choice in enumerate(result.choices, 1):
        _show(f"--- choice {number}\n" + (choice.text + "\n" if choice.text else ""), as_json=as_json)
        if not as_json:
            _tell_textless(choice)


def _end(result: Result, *, is_one: bool, as_json: bool) -> None:
    _close(result, is_one=is_one, as_json=as_json)
    if as_json:
        print_json(result.to_json())
    elif is_one:
        _tell_textless(result.choices[0])
    if as_json and not any(choice.token_ids for choice in result.choices):
        say("(the model ended at once)")
    if result.degraded is not None:
        cut, told = result.degraded, []
        if cut.max_tokens != cut.asked_max_tokens:
            told.append(f"at most {cut.max_tokens} tokens instead of {cut.asked_max_tokens}")
        if cut.pool:
            told.append(f"pool {cut.pool} instead of {cut.asked_pool}")
        if cut.not_streamed:
            told.append("no stream")
        say(f"(overload: {', '.join(told)})")


def _tell_textless(choice: Choice) -> None:
    if not choice.text and choice.token_ids:
        write(",".join(map(str, choice.token_ids)) + "\n")
        say("(token ids: this cluster's routers have no tokenizer, or the tokens are no text)")
    elif not choice.text:
        say("(the model ended at once)")


async def feedback(target: Target, request_id: str, score: float, *, tenant: str, as_json: bool) -> None:
    async with target.client(tenant=tenant) as client:
        given = await client.feedback(request_id, score)
    if as_json:
        print_json(given)
        return
    counted = "counts" if given.counted else "does not count: an earlier score of this answer stands"
    write(f"{score:g} for {given.adapter or 'the base model'} {counted}\n")
