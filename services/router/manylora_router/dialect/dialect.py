"""What the model's chat template says of tools and reasoning: which grammar its answers have, and what it can render.

Readers of answers are made here, one for each choice. Knows no endpoint's form.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

from manylora_router.dialect.channels import ANALYSIS, CHANNEL_MARKS, FINAL, ROLE, channels, said
from manylora_router.dialect.grammars import FAMILIES, Family, Functions
from manylora_router.dialect.pieces import Output, Piece, Stream, all_text, until
from manylora_router.dialect.writing import Marks, TokenOf, calls, text_and_calls

AUTO, NONE = "auto", "none"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_WORD = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|(\w+)""", re.DOTALL)


@dataclass(frozen=True)
class Thinking:
    begin: str
    end: str
    # of answers in messages: what stands behind the reasoning's, and the head of one that is no call
    role: str = ""
    head: str = ""

    def is_in(self, template: str) -> bool:
        return (self.begin if self.head else self.end) in template

    def may_follow(self, prompt_end: str) -> bool:
        """The answer may begin with reasoning, or has begun with it."""
        if self.head:
            return _ends(prompt_end, self.role) or _ends(prompt_end, self.begin)
        return not _ends(prompt_end, self.end)


# in the order in which a template is looked at
THINKING: Mapping[str, Thinking] = {
    "gpt-oss": Thinking(ANALYSIS, "<|end|>", ROLE, FINAL),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "gemma": Thinking("<|channel>thought\n", "<channel|>"),
    "think": Thinking("<think>", "</think>"),
}
_CHANNELS = ("<|channel>", *CHANNEL_MARKS)  # tokens in Gemma's mark, and in those of gpt-oss


@dataclass(frozen=True)
class Dialect:
    family: Family | None = None  # None: calls of tools are not read
    thinking: Thinking | None = None
    words: frozenset[str] = frozenset()  # variables, and whole strings, of the template's code

    @classmethod
    def of(cls, template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Dialect:
        """`tool_parser` and `reasoning_parser`: auto, none, or a name of FAMILIES and THINKING."""
        family: Family | None = FAMILIES.get(tool_parser)
        thinking: Thinking | None = THINKING.get(reasoning_parser)
        if tool_parser == AUTO:
            family = next((each for each in FAMILIES.values() if any(sign in template for sign in each.signs)), None)
        if reasoning_parser == AUTO:
            thinking = next((each for each in THINKING.values() if each.is_in(template)), None)
        return cls(family, thinking, words_of(template))

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.words

    @property
    def has_channels(self) -> bool:
        """Answers are messages, each of a channel."""
        family, thinking = self.family, self.thinking
        return (family is not None and family.has_channels) or (thinking is not None and thinking.head != "")

    @property
    def marks(self) -> Sequence[str]:
        """Special tokens that an answer's text must keep."""
        thinking = [self.thinking.begin, self.thinking.end, *_CHANNELS] if self.thinking is not None else []
        return [*(self.family.marks if self.family is not None else ()), *thinking]

    def reader(self, functions: Functions, prompt_end: str, *, most_calls: int | None = None) -> AnswerReader:
        """For one choice.

        Args:
            functions: that were offered; empty: no calls are read.
            prompt_end: the prompt's last text, in which a template may have begun the reasoning.
        """
        out, stream = Output(most_calls), Stream()
        family = self.family if functions else None
        if self.thinking is not None and self.thinking.head:
            read = functions if family is not None and family.has_channels else {}
            return AnswerReader(stream, out, channels(stream, out, read, prompt_end))
        return AnswerReader(stream, out, _answer(stream, out, self.thinking, prompt_end, family, functions))

    def calls_grammar(
        self, functions: Functions, prompt_end: str, token_of: TokenOf, *, is_one: bool, answer: str = ""
    ) -> str:
        """Of answers that are calls, behind their reasoning: what `reader` reads as such. In llguidance's Lark.

        answer: a rule of this name, of what an answer may be instead. token_of: a mark's, where it is one.
        Raises ValueError for parameters that are not supported.
        """
        assert self.family is not None, "calls are read"
        marks = Marks(self.marks, token_of)
        rules = calls(self.family.writing, functions, marks, is_one=is_one)
        rule = f"({self._headed('answer', prompt_end, marks)} | calls)" if answer else "calls"
        return "\n".join([*self._start(rule, prompt_end, marks), *rules, answer])

    def strict_grammar(
        self, functions: Functions, strict: Collection[str], prompt_end: str, token_of: TokenOf, *, is_one: bool
    ) -> str:
        """Of answers that may have calls in their text, whose arguments are as the schemas of `strict` ones say. As
        `calls_grammar` else.
        """
        assert self.family is not None, "calls are read"
        marks = Marks(self.marks, token_of)
        free = {name: self.family.closing for name in functions if name not in strict}
        if self.family.has_channels:
            is_begun = self.thinking is not None and not self.reasons(prompt_end)
            rules = said(functions, marks, is_one=is_one, free=free, is_begun=is_begun)
            return "\n".join([*self._start("said", prompt_end, marks), *rules])
        assert self.family.opening is not None, "it is refused"
        rules = text_and_calls(self.family.writing, self.family.opening, functions, marks, is_one=is_one, free=free)
        return "\n".join([*self._start("said", prompt_end, marks), *rules])

    def reasons(self, prompt_end: str) -> bool:
        """An answer may begin with reasoning."""
        return self.thinking is not None and self.thinking.may_follow(prompt_end)

    def behind_reasoning(self, rule: str, prompt_end: str, token_of: TokenOf) -> str:
        """rule: what the answer must be, of the name `answer`, in Lark."""
        marks = Marks(self.marks, token_of)
        return "\n".join([*self._start(self._headed("answer", prompt_end, marks), prompt_end, marks), rule])

    def _headed(self, rule: str, prompt_end: str, marks: Marks) -> str:
        has_head = self.thinking is not None and self.thinking.head and self.reasons(prompt_end)
        return f"{marks.lark(FINAL)} {rule}" if has_head else rule

    def _start(self, rule: str, prompt_end: str, marks: Marks) -> list[str]:
        """With the reasoning before the rule."""
        thinking = self.thinking
        if thinking is None or not self.reasons(prompt_end):
            return [f"start: {rule}"]
        thought = f"thought {marks.lark(thinking.role)}" if thinking.role else "thought SPACE?"
        if not _ends(prompt_end, thinking.begin):
            thought = f"({marks.lark(thinking.begin)} {thought})?"
        return [f"start: {thought} {rule}", "SPACE: /\\s{1,4}/", *marks.text_to("thought", thinking.end)]


class AnswerReader:
    """Text in, pieces out: the same however the text was cut, but for where pieces of a kind are."""

    def __init__(self, stream: Stream, out: Output, grammar: Generator[None]) -> None:
        self._stream = stream
        self._out = out
        self._grammar = grammar

    def push(self, text: str) -> list[Piece]:
        self._stream.text += text
        next(self._grammar)
        return self._out.drain()

    def finish(self) -> list[Piece]:
        """Once; nothing comes after it."""
        self._stream.is_over = True
        for _ in self._grammar:
            raise AssertionError("a grammar waits for text that is over")
        self._out.finish()
        return self._out.drain()

    @property
    def has_calls(self) -> bool:
        """Whole ones."""
        return self._out.num_whole_calls > 0


def _answer(
    stream: Stream,
    out: Output,
    thinking: Thinking | None,
    prompt_end: str,
    family: Family | None,
    functions: Functions,
) -> Generator[None]:
    if thinking is not None:
        is_inside = _ends(prompt_end, thinking.begin)
        if not is_inside:
            at = yield from stream.after_space(0)
            if is_inside := (yield from stream.has(thinking.begin, at)):
                stream.take(at + len(thinking.begin))
        if is_inside:
            stream.take((yield from stream.after_space(0)))
            if (yield from until(stream, out.reasoning, thinking.end)):
                stream.take(len(thinking.end))
            out.drop_space()
            stream.take((yield from stream.after_space(0)))
    if family is not None:
        yield from family.grammar(stream, out, functions)
    else:
        yield from all_text(stream, out)


def _ends(prompt_end: str, mark: str) -> bool:
    return prompt_end.rstrip().endswith(mark.rstrip())


def words_of(template: str) -> frozenset[str]:
    """Names and whole strings of its code: what it can read of a request is among them."""
    code = _CODE.findall(_COMMENT.sub("", template))
    return frozenset(next(filter(None, found), "") for each in code for found in _WORD.findall(each))
