"""`manylora generate`: streams one answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from manylora.cli.output import EXIT_FAILED, Target, print_json, report, say, write
from manylora.client import Delta, RequestFailed, Result, Sampling


def read_prompt(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


async def generate(
    target: Target,
    prompt: str | Sequence[int],
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
    async with (
        target.client(tenant=tenant) as client,
        client.generate(
            prompt,
            adapter=adapter,
            qos_class=qos_class,
            priority=priority,
            timeout_s=timeout_s,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
        ) as stream,
    ):
        try:
            async for event in stream:
                if isinstance(event, Delta) and event.text:
                    _show(event.text, as_json=as_json)
        except RequestFailed as error:
            if error.result is not None and error.result.text:
                _show("\n", as_json=as_json)
            partial = {} if error.result is None else {"partial": error.result.to_json()}
            report(error, as_json=as_json, others=partial)
            raise typer.Exit(EXIT_FAILED) from None
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
    if result.degraded is not None:
        cut = result.degraded
        say(f"(overload: at most {cut.max_tokens} tokens instead of {cut.asked_max_tokens})")
