"""Answers in messages of channels, as gpt-oss writes them (OpenAI's harmony format): the analysis is reasoning, what is
for a function is a call, all else is text.

A message is a head up to its mark, and a body. The prompt ends behind the role of the first head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass

from manylora_router.dialect.json_calls import arguments
from manylora_router.dialect.pieces import Output, Stream, Waiting, until
from manylora_router.dialect.schemas import Schema
from manylora_router.dialect.writing import Marks, Writing, calls

_START, _CHANNEL, _BODY, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CALL, _CONSTRAIN, _RETURN = "<|call|>", "<|constrain|>", "<|return|>"
CHANNEL_MARKS = (_START, _CHANNEL, _BODY, _END, _CALL, _CONSTRAIN, _RETURN)
ROLE = f"{_START}assistant"
ANALYSIS, FINAL, _PREAMBLE = (f"{_CHANNEL}{name}{_BODY}" for name in ("analysis", "final", "commentary"))
CHANNEL_WRITING = Writing(f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_BODY}", "")

_ENDS = (_END, _CALL, _RETURN)
_MAX_HEAD_CHARS = 256
_HEAD = re.compile(
    r"\s*(?:<\|start\|>assistant)?\s*(?:to=([\w.-]+)\s*)?(?:<\|channel\|>(\w+)\s*(?:to=([\w.-]+)\s*)?)?"
    r"(?:(?:<\|constrain\|>)?\w+\s*)?<\|message\|>"
)

_CUT_HEAD = re.compile(r"\s*(?:<\|start\|>(?:assistant)?)?(?:<\|channel\|>\w{0,16})?")


@dataclass(frozen=True)
class _Head:
    channel: str
    function: str  # empty: the message is for the caller
    length: int


def channels(stream: Stream, out: Output, functions: Collection[str], prompt_end: str = "") -> Generator[None]:
    """prompt_end: the prompt's last text, which may have begun the reasoning."""
    told: Callable[[str], None] | None = None  # how the last message was told
    if prompt_end.rstrip().endswith(ANALYSIS):
        told = out.reasoning
        yield from _message(stream, out, told)
    while (yield from stream.reaches(0)):
        is_headed = yield from _begins_head(stream)
        head = (yield from _head(stream)) if is_headed else None
        if is_headed and head is None and stream.is_over and _CUT_HEAD.fullmatch(stream.text):
            break
        if head is not None and head.function in functions:
            out.begin(head.function, stream.take((yield from stream.after_space(head.length))))
            is_whole = yield from arguments(stream, out)
            yield from _message(stream, out, out.text, is_raw=not is_whole)
            told = None
        elif is_headed and (head is None or head.function):
            out.text(stream.take(head.length if head is not None else 1))
            yield from _message(stream, out, out.text, is_raw=True)
            told = None
        else:
            stream.take(head.length if head is not None else 0)
            tell = out.reasoning if head is not None and head.channel == "analysis" else out.text
            yield from _message(stream, out, tell, is_next=told == tell)
            told = tell


def said(
    functions: Mapping[str, Schema], marks: Marks, *, is_one: bool, free: Mapping[str, str], is_begun: bool
) -> Iterator[str]:
    """Rules, the first of them `said`: an answer that is text, or text and a call. As `calls` else.

    is_begun: a message's body is.
    """
    if is_begun:
        yield "said: SAID?"
    else:
        yield f"said: {marks.lark(FINAL)} SAID? | ({marks.lark(_PREAMBLE)} preamble {marks.lark(ROLE)})? calls"
        yield from marks.text_to("preamble", _END)
        yield from calls(CHANNEL_WRITING, functions, marks, is_one=is_one, free=free)
    yield "SAID: /(?s:.+)/"


def _message(
    stream: Stream, out: Output, tell: Callable[[str], None], *, is_raw: bool = False, is_next: bool = False
) -> Generator[None]:
    """A body. is_raw: its end is told too. is_next: a blank line parts it from what was told before."""
    parting = "\n\n" if is_next else ""

    def parted(text: str) -> None:
        nonlocal parting
        if text:
            tell(parting + text)
            parting = ""

    is_ended = yield from until(stream, parted, *_ENDS, _START, _CHANNEL)
    end = next((each for each in _ENDS if stream.text.startswith(each)), "")
    if is_raw:
        out.text(stream.take(len(end)))
        return
    stream.take(len(end))
    if is_ended or tell == out.reasoning:
        out.drop_space()


def _begins_head(stream: Stream) -> Waiting:
    at = yield from stream.after_space(0)
    for sign in (_START, _CHANNEL, "to="):
        if (yield from stream.has(sign, at)):
            return True
    return False


def _head(stream: Stream) -> Generator[None, None, _Head | None]:
    """None: it is none that is known."""
    while (at := stream.text.find(_BODY)) < 0:
        if stream.is_over or len(stream.text) > _MAX_HEAD_CHARS + len(_BODY):
            return None
        yield
    found = _HEAD.match(stream.text) if at <= _MAX_HEAD_CHARS else None
    if found is None:
        return None
    recipient = found[1] or found[3] or ""
    return _Head(found[2] or "", recipient.removeprefix("functions."), found.end())
