"""`manylora chat`: a talk of many turns. A turn that fails is taken back; the talk goes on."""

from __future__ import annotations

import contextlib
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer

from manylora.cli.generation import NO_CHAT_TEMPLATE
from manylora.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, Target, report, say, write
from manylora.client import Delta, RequestFailed, Result, SyncClient

HELP = """/new            forget the talk, but for the system's message
/system TEXT    the system's message from here on, in a new talk; without TEXT none
/adapter NAME   who answers from here on; without NAME the base model
/exit           end, as the end of the input does
Ctrl-C          stop an answer: what came of it stays in the talk"""


@dataclass
class Talk:
    """What is sent with the next turn."""

    system: str | None = None
    adapter: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    conversation: str = field(default_factory=lambda: uuid.uuid4().hex)  # which one version of an adapter answers

    def begin_anew(self) -> None:
        self.turns.clear()
        self.conversation = uuid.uuid4().hex

    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def command(self, line: str) -> bool:
        """Whether the talk goes on."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit":
                return False
            case "/new":
                self.begin_anew()
            case "/system":
                self.system = argument or None
                self.begin_anew()
            case "/adapter":
                self.adapter = argument
            case "/help":
                say(HELP)
            case _:
                say(f"there is no {name}\n{HELP}")
        return True


def chat(target: Target, talk: Talk, *, tenant: str, **options: Any) -> None:
    """Lines of stdin, to its end. options: SyncClient.generate's. Exit code 1 where a turn failed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines with it
        say("/help tells the commands; Ctrl-D ends")
    has_failed = False
    with target.sync_client(tenant=tenant) as client:
        for line in iter(_reader("> " if is_terminal else ""), None):
            if line.startswith("/"):
                if not talk.command(line):
                    break
            elif line.strip():
                has_failed |= not _turn(client, talk, line, options)
    if has_failed:
        raise typer.Exit(EXIT_FAILED)


def _reader(mark: str) -> Callable[[], str | None]:
    def read() -> str | None:
        try:
            return input(mark)
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return read


def _turn(client: SyncClient, talk: Talk, text: str, options: dict[str, Any]) -> bool:
    """Whether it was answered."""
    talk.turns.append({"role": "user", "content": text})
    answer, is_stopped = "", False
    stream = client.generate(talk.messages(), adapter=talk.adapter, conversation=talk.conversation, **options)

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, stop)  # and no KeyboardInterrupt, which may come anywhere
    try:
        for event in stream:
            if isinstance(event, Delta):
                answer += event.text
                write(event.text)
    except RequestFailed as error:
        if not is_stopped:
            return _taken_back(talk, answer, error)
    finally:
        signal.signal(signal.SIGINT, before)
    if is_stopped:
        say("\n(stopped)")
    else:
        _tell_end(stream.result())
    talk.turns.append({"role": "assistant", "content": answer})
    return True


def _taken_back(talk: Talk, answer: str, error: RequestFailed) -> bool:
    """False, or typer.Exit where no other turn can be answered either."""
    if answer:
        write("\n")
    report(error, as_json=False)
    talk.turns.pop()
    if error.reason == NO_CHAT_TEMPLATE:
        say("`manylora generate` sends text as it is")
        raise typer.Exit(EXIT_FAILED) from None
    return False


def _tell_end(result: Result) -> None:
    write("\n")
    if not result.text:
        say("(the model ended at once)")
    elif result.finish_reason == "length":
        say(f"(cut at {result.usage.completion_tokens} tokens)")
