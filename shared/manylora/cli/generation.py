"""`manylora generate`: streams one answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from manylora_shared.errors import NoChatTemplate

from manylora.cli.output import EXIT_FAILED, Target, print_json, report, say, write
from manylora.client import Delta, GenerateStream, RequestFailed, Result, Sampling
from manylora.client.prompts import Prompt

NO_CHAT_TEMPLATE = NoChatTemplate.label.upper()


def prompts(argument: str, system: str | None, *, is_raw: bool) -> list[Prompt]:
    """Each is sent where the model has no chat template for the one before."""
    text = sys.stdin.read() if argument == "-" else argument
    user = {"role": "user", "content": text}
    if is_raw:
        return [text]
    return [[user], text] if system is None else [[{"role": "system", "content": system}, user]]


async def generate(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    tenant: str,
    adapter: str,
    qos_class: str,
    priority: int | None,
    timeout_s: float | None,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    as_json: bool,
) -> None:
    async with target.client(tenant=tenant) as client:
        for number, prompt in enumerate(prompts, 1):
            stream = client.generate(
                prompt,
                adapter=adapter,
                qos_class=qos_class,
                priority=priority,
                timeout_s=timeout_s,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stop,
            )
            try:
                await _stream(stream, as_json=as_json)
                return
            except RequestFailed as error:
                if error.reason != NO_CHAT_TEMPLATE or number == len(prompts):
                    partial = {} if error.result is None else {"partial": error.result.to_json()}
                    report(error, as_json=as_json, others=partial)
                    raise typer.Exit(EXIT_FAILED) from None


async def _stream(stream: GenerateStream, *, as_json: bool) -> None:
    try:
        async with stream:
            async for event in stream:
                if isinstance(event, Delta) and event.text:
                    _show(event.text, as_json=as_json)
    except RequestFailed as error:
        if error.result is not None and error.result.text:
            _show("\n", as_json=as_json)
        raise
    _end(stream.result(), as_json=as_json)


def _show(text: str, *, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        write(text)


def _end(result: Result, *, as_json: bool) -> None:
    if result.text:
        _show("\n", as_json=as_json)
    if as_json:
        print_json(result.to_json())
    elif not result.text and result.token_ids:
        write(",".join(map(str, result.token_ids)) + "\n")
        say("(token ids: this cluster's routers have no tokenizer, or the tokens are no text)")
    if not result.text and not result.token_ids:
        say("(the model ended at once)")
    if result.degraded is not None:
        cut = result.degraded
        say(f"(overload: at most {cut.max_tokens} tokens instead of {cut.asked_max_tokens})")
