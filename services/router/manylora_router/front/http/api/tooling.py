"""Tools of a request in the endpoints' shapes, and what answers to it are read with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.errors import InvalidRequest, shown

from manylora_router.dialect.dialect import AnswerReader, Dialect
from manylora_router.front.http.api.constraints import FORMAT
from manylora_router.front.http.fields import Fields, is_shallow, is_unicode
from manylora_router.guard.admission import MAX_TEXT_BYTES, ChatPrompt, RequestInput
from manylora_router.text.service import TextService

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = MAX_ARGUMENTS_DEPTH = 64
UNUSED_OF_TOOLS = ("allowed_callers", "defer_loading", "input_examples")  # of Anthropic's
NEUTRAL_OF_TOOLS: tuple[Any, ...] = (False, [], ["direct"])
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
CHOICE = "tool_choice"
_PROMPT_END_TOKENS = 8  # of which the mark that begins reasoning is made, and the white space behind it


@dataclass(frozen=True)
class Tools:
    offered: Sequence[Mapping[str, Any]] = ()  # as templates take them
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # that may be called: their parameters
    most_calls: int | None = None
    must_call: bool = False
    is_named: bool = False  # the one to be called
    strict: Collection[str] = ()  # functions whose arguments are as their parameters say, if they are called


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    dialect: Dialect
    tools: Tools
    text: TextService
    request_id: str
    tells_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """There is nothing in an answer but text."""
        return self.dialect.thinking is None and not self.tools.functions

    @property
    def names(self) -> Mapping[str, str]:
        """Where what is wrong with the constraint is to be sought."""
        return {"constraint.grammar": "tools"} if self.tools.functions else {}

    @property
    def kept_tokens(self) -> Sequence[str]:
        return () if self.is_plain else self.dialect.marks

    def reader(self, prompt_token_ids: Sequence[int]) -> AnswerReader:
        end = self._end_of(prompt_token_ids)
        return self.dialect.reader(self.tools.functions, end, most_calls=self.tools.most_calls)

    def _end_of(self, prompt_token_ids: Sequence[int]) -> str:
        return "".join(self.text.token(token_id) for token_id in prompt_token_ids[-_PROMPT_END_TOKENS:])

    def asked(self, request: RequestInput, prompt: ChatPrompt, form: str = FORMAT) -> RequestInput:
        """With what tools and reasoning make of it. form: the field that a constraint came from.

        Raises InvalidRequest.
        """
        request = replace(request, prompt=prompt, request_id=self.request_id, kept_tokens=self.kept_tokens)
        constraint = request.constraint
        if self.tools.must_call and constraint is not None:
            raise InvalidRequest.of(CHOICE, f"has the model call tools: leave out {form}")
        if self.tools.must_call or (constraint is not None and self._may_call):
            return replace(request, constraint_after=lambda prompt_ids: self._calls(prompt_ids, constraint))
        if constraint is None and self.tools.strict:
            return replace(request, constraint_after=self._strict)
        if constraint is not None and self.dialect.thinking is not None:
            return replace(request, constraint_after=lambda prompt_ids: self._behind_reasoning(constraint, prompt_ids))
        return request

    @property
    def _may_call(self) -> bool:
        family = self.dialect.family
        return bool(self.tools.functions) and family is not None and family.may_be_strict

    def _behind_reasoning(self, constraint: Constraint, prompt_token_ids: Sequence[int]) -> Constraint:
        end = self._end_of(prompt_token_ids)
        if not self.dialect.reasons(end):
            return constraint
        grammar = self.dialect.behind_reasoning(_answer_rule(constraint), end, self.text.mark)
        return Constraint(ConstraintKind.GRAMMAR, grammar)

    def _calls(self, prompt_token_ids: Sequence[int], constraint: Constraint | None) -> Constraint:
        """constraint: of answers that are no calls; None: there are none. Raises InvalidRequest."""
        functions, end, is_one = self.tools.functions, self._end_of(prompt_token_ids), self.tools.most_calls == 1
        answer = _answer_rule(constraint) if constraint is not None else ""
        try:
            grammar = self.dialect.calls_grammar(functions, end, self.text.mark, is_one=is_one, answer=answer)
        except ValueError as error:
            raise InvalidRequest.of("tools", str(error)) from None
        return Constraint(ConstraintKind.GRAMMAR, grammar)

    def _strict(self, prompt_token_ids: Sequence[int]) -> Constraint:
        """Raises InvalidRequest."""
        tools, end = self.tools, self._end_of(prompt_token_ids)
        try:
            grammar = self.dialect.strict_grammar(
                tools.functions, tools.strict, end, self.text.mark, is_one=tools.most_calls == 1
            )
        except ValueError as error:
            raise InvalidRequest.of("tools", str(error)) from None
        return Constraint(ConstraintKind.GRAMMAR, grammar)

    def call_id(self, choice: int, number: int) -> str:
        family = self.dialect.family
        assert family is not None, "there are no calls that nobody read"
        digest = hashlib.sha256(f"{self.request_id}/{choice}/{number}".encode()).hexdigest()
        return family.id_prefix + digest[: family.id_chars]


def _answer_rule(constraint: Constraint) -> str:
    from manylora_shared.constraints.grammar import rule_of  # here: routers that never see one do without

    return rule_of(constraint, "answer")


def read_tools(fields: Fields, dialect: Dialect, *, is_flat: bool = False) -> Tools:
    """OpenAI's. `is_flat`: a tool's members are its function's, as in responses."""
    parallel = fields.flag("parallel_tool_calls", True)
    kind = fields.peek(CHOICE)
    strictness = _Strictness(dialect, is_auto=kind in (None, "auto"))
    found = [_function(tool, is_flat, strictness) for tool in _tools(fields, dialect)]
    if not isinstance(kind, dict):
        fields.only(CHOICE, "auto", "none", "required")
        return _offered(
            fields, found, not parallel, is_none=kind == "none", must_call=kind == "required", strict=strictness.strict
        )
    choice = fields.inner(CHOICE)
    choice.only("type", "function")
    function = choice if is_flat else choice.inner("function")
    name = function.text("name")
    for each in {id(choice): choice, id(function): function}.values():
        each.close()
    return _offered(fields, found, not parallel, must_call=True, name=name)


def read_anthropic_tools(fields: Fields, dialect: Dialect) -> Tools:
    found = []
    given = fields.peek(CHOICE)
    strictness = _Strictness(dialect, is_auto=not isinstance(given, dict) or given.get("type", "auto") == "auto")
    for tool in _tools(fields, dialect):
        tool.only("type", "custom")
        tool.ignore("cache_control", "eager_input_streaming")
        for name in UNUSED_OF_TOOLS:
            tool.only(name, *NEUTRAL_OF_TOOLS)
        strictness.read(tool)
        found.append(_named(tool, "input_schema"))
    choice = fields.inner(CHOICE)
    choice.only("type", "auto", "none", "any", "tool")
    is_serial, kind = choice.flag("disable_parallel_tool_use"), choice.peek("type")
    named = choice.text("name") if kind == "tool" else None
    choice.close()
    return _offered(
        fields,
        found,
        is_serial,
        is_none=kind == "none",
        must_call=kind in ("any", "tool"),
        name=named,
        strict=strictness.strict,
    )


class _Strictness:
    """Which functions are `strict`. Where the model may call or not, its calls must begin as nothing else does."""

    def __init__(self, dialect: Dialect, *, is_auto: bool) -> None:
        self._is_auto = is_auto
        self._is_kept = dialect.family is None or dialect.family.may_be_strict
        self.strict: list[str] = []

    def read(self, function: Fields) -> None:
        if not function.flag("strict") or not self._is_auto:
            return
        if not self._is_kept:
            function.wrong(
                "strict", f"is not supported with {CHOICE} auto: no mark begins this model's calls; required keeps it"
            )
        self.strict.append(str(function.peek("name")))


def _tools(fields: Fields, dialect: Dialect) -> list[Fields]:
    given = fields.raw("tools")
    if given is None or given == []:
        return []
    if not isinstance(given, list) or len(given) > MAX_TOOLS or not all(isinstance(each, dict) for each in given):
        fields.wrong("tools", f"must be a list of at most {MAX_TOOLS} objects")
    elif not is_shallow(given, MAX_SCHEMA_DEPTH) or not is_unicode(json.dumps(given, ensure_ascii=False)):
        fields.wrong("tools", f"is deeper than {MAX_SCHEMA_DEPTH}, or has half of a surrogate pair")
    elif not dialect.takes_tools:
        fields.wrong("tools", "is nothing that the model's chat template takes")
    elif dialect.family is None:
        fields.wrong("tools", "is not supported: calls in this model's answers are not read (router's --tool-parser)")
    else:
        return [Fields(each, f"{fields.path}tools[{i}].", fields.found) for i, each in enumerate(given)]
    return []


def _function(tool: Fields, is_flat: bool, strictness: _Strictness) -> dict[str, Any]:
    tool.only("type", "function")
    if is_flat:
        strictness.read(tool)
        return _named(tool, "parameters")
    function = tool.inner("function")
    tool.close()
    strictness.read(function)
    return _named(function, "parameters")


def _named(function: Fields, parameters: str) -> dict[str, Any]:
    name, description = function.text("name"), function.text("description")
    if not _NAME.fullmatch(name):
        function.wrong("name", "must be 1 to 128 letters, digits, dots, dashes or underscores")
    found: dict[str, Any] = {"name": name}
    if description:
        found["description"] = description
    found["parameters"] = function.members_of(parameters) or _NO_PARAMETERS
    function.close()
    return found


def _offered(
    fields: Fields,
    functions: Sequence[Mapping[str, Any]],
    is_serial: bool,
    *,
    is_none: bool = False,
    must_call: bool = False,
    name: str | None = None,
    strict: Collection[str] = (),
) -> Tools:
    """With the choice `none` the model is not told of them. name: of the only one that is to be called."""
    schemas = {function["name"]: function["parameters"] for function in functions}
    if must_call and not functions and fields.raw("tools") in (None, []):
        fields.wrong(CHOICE, "needs tools that can be called")
    if name is not None and functions and name not in schemas:
        fields.wrong(CHOICE, f"{shown(name)} is none of the tools")
    if is_none or not functions or fields.found:
        return Tools()
    offered = [{"type": "function", "function": function} for function in functions]
    schemas = schemas if name is None else {name: schemas[name]}
    is_named = name is not None
    return Tools(offered, schemas, 1 if is_serial or is_named else None, must_call, is_named, strict)


def read_calls(message: Fields, name: str = "tool_calls") -> list[tuple[str, str, dict[str, Any]]]:
    """Ids, names and arguments of an earlier answer's calls, in OpenAI's shape."""
    given = message.raw(name)
    found: list[tuple[str, str, dict[str, Any]]] = []
    if given is not None and not isinstance(given, list):
        message.wrong(name, "must be a list of calls")
    elif given is not None and len(given) > MAX_TOOLS:
        message.wrong(name, f"has {len(given)} calls; at most {MAX_TOOLS} are read")
        return []
    for index, each in enumerate(given if isinstance(given, list) else ()):
        path = f"{name}[{index}]"
        if not isinstance(each, dict):
            message.wrong(path, "must be an object")
            break
        call = Fields(each, f"{message.path}{path}.", message.found)
        call.only("type", "function")
        call.ignore("index")
        function = call.inner("function")
        found.append((call.text("id"), function.text("name"), read_arguments(function)))
        function.close()
        call.close()
    return found


def read_arguments(call: Fields) -> dict[str, Any]:
    text = call.text("arguments", "{}")
    if len(text) > MAX_TEXT_BYTES:  # before it is looked into: this is the event loop
        call.wrong("arguments", f"has more than {MAX_TEXT_BYTES} bytes")
        return {}
    try:
        found = json.loads(text)
        told = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        found, told = None, ""
    if not isinstance(found, dict) or not is_shallow(found, MAX_ARGUMENTS_DEPTH):
        call.wrong("arguments", f"must be the text of a JSON object, no deeper than {MAX_ARGUMENTS_DEPTH}")
    elif not is_unicode(told):
        call.wrong("arguments", "has half of a surrogate pair: it is no Unicode text")
    else:
        return found
    return {}
