"""How each family of models writes calls of tools into its answer.

What is no call stays text: a call without its end, of a tool that was not offered, or in no form that is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from manylora_router.dialect import literals
from manylora_router.dialect.channels import CHANNEL_MARKS, CHANNEL_WRITING, channels
from manylora_router.dialect.json_calls import arguments, json_call, json_calls
from manylora_router.dialect.literals import NotReadable
from manylora_router.dialect.marked_arguments import marked_arguments
from manylora_router.dialect.pieces import Output, Stream, Waiting, all_text, until
from manylora_router.dialect.schemas import Schema
from manylora_router.dialect.tagged_calls import tagged_arguments, tagged_call
from manylora_router.dialect.writing import Writing

Functions = Mapping[str, Schema]  # that were offered, by name: their parameters
Grammar = Callable[[Stream, Output, Functions], Generator[None]]

_MAX_HEAD_CHARS = 256
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_LIST_HEAD = re.compile(r"\[\s*(?:([A-Za-z_][\w.-]*)\s*(\(.*)?)?", re.DOTALL)
_CALL = "call:"


@dataclass(frozen=True)
class Family:
    grammar: Grammar
    writing: Writing
    signs: Sequence[str]  # of its templates; one suffices
    marks: Sequence[str] = ()  # tokens of the answer that the grammar reads, special though they may be
    id_prefix: str = "call_"
    id_chars: int = 24  # Mistral's templates take no other ids than of nine characters
    has_channels: bool = False  # an answer without calls has a form too

    @property
    def opening(self) -> str | None:
        """The mark that begins a call, as nothing else does; None: there is none."""
        marks = () if self.has_channels else self.marks
        return next((each for each in marks if (self.writing.begin or self.writing.head).startswith(each)), None)

    @property
    def closing(self) -> str:
        """The mark that ends a call; empty: there is none."""
        return next((each for each in self.marks if self.writing.tail.endswith(each)), "")

    @property
    def may_be_strict(self) -> bool:
        """What is a call, and what is none, is told apart as the answer is written."""
        return self.opening is not None or self.has_channels


def hermes(stream: Stream, out: Output, functions: Functions) -> Generator[None]:
    """Hermes, Qwen 2.5 and 3: an object, or a list of them, between tags."""
    begin, end = "<tool_call>", "</tool_call>"
    while (yield from until(stream, out.text, begin)):
        if not (yield from json_calls(stream, out, functions, len(begin))):
            out.text(stream.take(len(begin)))
            continue
        at = yield from stream.after_space(0)
        if (yield from stream.has(end, at)):
            stream.take(at + len(end))


def qwen_coder(stream: Stream, out: Output, functions: Functions) -> Generator[None]:
    """Qwen3-Coder: tags for the function and each parameter."""
    begin = "<tool_call>"
    while (yield from until(stream, out.text, begin)):
        if not (yield from tagged_call(stream, out, functions)):
            out.text(stream.take(len(begin)))


def llama(stream: Stream, out: Output, functions: Functions) -> Generator[None]:
    """Llama 3 and 4: the answer begins with JSON objects, or is a list of Python's calls."""
    tag = "<|python_tag|>"
    at = yield from stream.after_space(0)
    if (yield from stream.has(tag, at)):
        at = yield from stream.after_space(at + len(tag))
    if (yield from stream.has("[", at)):
        yield from _python_calls(stream, out, functions, at)
    else:
        while (yield from json_call(stream, out, functions, at)):
            at = yield from stream.after_space(0)
            if (yield from stream.has(";", at)):
                at += 1
    yield from all_text(stream, out)


def mistral(stream: Stream, out: Output, functions: Functions) -> Generator[None]:
    """A mark, then a list of objects, or a name and its arguments."""
    mark = "[TOOL_CALLS]"
    while (yield from until(stream, out.text, mark)):
        at = yield from stream.after_space(len(mark))
        is_json = (yield from stream.has("[", at)) or (yield from stream.has("{", at))
        read = json_calls if is_json else _named_call
        if not (yield from read(stream, out, functions, len(mark))):
            out.text(stream.take(len(mark)))


def gemma(begin: str, end: str, quote: str) -> Grammar:
    """`call:name{key:value}` between marks, its strings between quotes of their own."""
    notation = literals.quoted_by(quote)

    def read(stream: Stream, out: Output, functions: Functions) -> Generator[None]:
        while (yield from until(stream, out.text, begin)):
            while (stop := stream.text.find(end)) < 0 and not stream.is_over:
                yield
            stop = len(stream.text) if stop < 0 else stop
            found = _gemma_call(literals.Reader(stream.text[len(begin) : stop], notation), functions)
            if found is None:
                out.text(stream.take(len(begin)))
                continue
            out.call(*found, stream.take(stop + len(end)))

    return read


def _gemma_call(reader: literals.Reader, functions: Functions) -> tuple[str, str] | None:
    try:
        reader.need(_CALL)
        name = reader.name()
        reader.need("{")
        found = reader.members(":", "}")
    except NotReadable:
        return None
    return (name, _dumps(found)) if reader.is_at_end and name in functions else None


def _named_call(stream: Stream, out: Output, functions: Functions, start: int) -> Waiting:
    while (brace := stream.text.find("{", start)) < 0:
        if stream.is_over or len(stream.text) - start > _MAX_HEAD_CHARS:
            return False
        yield
    head = _MISTRAL_HEAD.fullmatch(stream.text, start, brace)
    if head is None or head[1] not in functions:
        return False
    out.begin(head[1], stream.take(brace))
    yield from arguments(stream, out)
    return True


def _python_calls(stream: Stream, out: Output, functions: Functions, start: int) -> Waiting:
    depth, quote, is_escaped, scanned = 0, "", False, start
    while True:
        for at in range(scanned, len(stream.text)):
            character = stream.text[at]
            if quote:
                quote = quote if is_escaped or character != quote else ""
                is_escaped = not is_escaped and character == "\\"
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "[({") - (character in "])}")
                if depth == 0:
                    return _take_python_calls(stream, out, functions, start, at + 1)
        scanned = len(stream.text)
        head = _LIST_HEAD.fullmatch(stream.text, start)
        is_known = head is not None and (head[1] in functions if head[2] else True)
        if stream.is_over or not is_known:
            return False
        yield


def _take_python_calls(stream: Stream, out: Output, functions: Functions, start: int, end: int) -> bool:
    reader, found = literals.Reader(stream.text[start:end], literals.PYTHON), []
    try:
        reader.need("[")
        while not reader.has("]"):
            name = reader.name()
            reader.need("(")
            found.append((name, _dumps(reader.members("=", ")"))))
            if not reader.has(","):
                reader.need("]")
                break
    except NotReadable:
        return False
    if not found or not all(name in functions for name, _ in found):
        return False
    source = stream.take(end)
    for name, given in found:
        out.call(name, given, source)
        source = ""
    return True


def _dumps(found: Mapping[str, object]) -> str:
    return json.dumps(found, ensure_ascii=False)


_NAME_AND_ARGUMENTS = '{"name": "NAME", "arguments": '
_HERMES = ("<tool_call>", "</tool_call>")
_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def _gemma_writing(begin: str, end: str, quote: str) -> Writing:
    return Writing(f"{begin}call:NAME", end, between="", arguments=marked_arguments(quote, end))


# in the order in which a template is looked at
FAMILIES: Mapping[str, Family] = {
    "gpt-oss": Family(channels, CHANNEL_WRITING, ["<|channel|>analysis"], CHANNEL_MARKS, has_channels=True),
    "mistral": Family(
        mistral, Writing("[TOOL_CALLS]NAME[ARGS]", "", between=""), ["[ARGS]"], _MISTRAL, id_prefix="", id_chars=9
    ),
    "mistral-list": Family(
        mistral,
        Writing(_NAME_AND_ARGUMENTS, "}", begin="[TOOL_CALLS] [", between=", ", end="]"),
        ["[TOOL_CALLS]"],
        _MISTRAL,
        id_prefix="",
        id_chars=9,
    ),
    "gemma": Family(gemma(*_GEMMA), _gemma_writing(*_GEMMA), ["<|tool_call>"], _GEMMA),
    "function-gemma": Family(
        gemma(*_FUNCTION_GEMMA), _gemma_writing(*_FUNCTION_GEMMA), ["<start_function_call>"], _FUNCTION_GEMMA
    ),
    "qwen-coder": Family(
        qwen_coder,
        Writing(
            "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n", arguments=tagged_arguments
        ),
        ["<function="],
        _HERMES,
    ),
    "hermes": Family(
        hermes,
        Writing(f"<tool_call>\n{_NAME_AND_ARGUMENTS}", "}\n</tool_call>", between="\n"),
        ["<tool_call>"],
        _HERMES,
    ),
    # its templates render one call of an answer
    "llama": Family(
        llama,
        Writing('{"name": "NAME", "parameters": ', "}"),
        ["<|python_tag|>", "<|start_header_id|>", "<|header_start|>"],
        ["<|python_tag|>"],
    ),
}
