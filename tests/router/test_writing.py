"""Answers that must be calls are read as such: random walks of every family's grammar."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from manylora_router.dialect.blocks import Blocks, Kind
from manylora_router.dialect.dialect import THINKING, Dialect, Thinking
from manylora_router.dialect.grammars import FAMILIES
from manylora_router.dialect.writing import Marks
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import LIMITS, grammar_of, refusal, rule_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|endoftext|>"
ROLE = "<|start|>assistant"
AGAIN = f"<|end|>{ROLE}"
LONG, LONGEST = 120, 6000  # tokens of a walk, after which it looks for its end, and which it never has
CLOSING = ['"', '"', '"', "}", "}", "]", "</think>", "</parameter>", ">", "<", ",", ":", "1", "\n", "a", AGAIN]
CLOSING += [each.closing for each in FAMILIES.values() if each.closing]  # of calls that are not strict

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Its name."},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "path": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
        "weird key!": {"type": "boolean"},
    },
    "required": ["at", "weird key!"],
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": ["integer", "null"]}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}
OPEN: dict[str, Any] = {"type": "object", "properties": {"more": {"type": "object"}, "kind": {"const": "open"}}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
STRINGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 2, "maxLength": 4},
        "b": {"type": ["string", "null"]},
        "c": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["c", "a"],
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": PLACE,
    "ns.walk-1": NESTED,
    "free": OPEN,
    "9lives": NOTHING,
    "strings": STRINGS,
}


@functools.cache
def tokenizer_of(marks: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer]:
    """One token a byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (END, *marks)])
    size = made.get_vocab_size()
    return made, LLTokenizer(made.to_str(), n_vocab=size, eos_token=[made.token_to_id(END)])


def walk(grammar: str, marks: Sequence[str], rng: random.Random, begun: str = "") -> str:
    """A random text of the grammar, to its end, that begins with `begun`."""
    tokenizer, tokens = tokenizer_of(tuple(marks))
    matcher = LLMatcher(tokens, grammar_of(Constraint(ConstraintKind.GRAMMAR, grammar)), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    end, size = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    closing = [[end], *([tokenizer.token_to_id(mark)] for mark in marks)]
    closing += [tokenizer.encode(each, add_special_tokens=False).ids for each in CLOSING]
    found: list[int] = tokenizer.encode(begun, add_special_tokens=False).ids
    assert matcher.consume_tokens(found), matcher.get_error()
    while not matcher.is_stopped() and len(found) < LONGEST:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(size) if mask[i // 8] >> (i % 8) & 1]
        wanted = [each for each in closing if matcher.validate_tokens(each) == len(each)] if len(found) > LONG else []
        plain = [i for i in allowed if i < 128] if rng.random() < 0.9 else []
        chosen = rng.choice(wanted) if wanted else [rng.choice(plain or allowed)]
        if chosen == [end]:
            break
        assert matcher.consume_tokens(chosen), matcher.get_error()
        found += chosen
    assert matcher.is_accepting(), tokenizer.decode(found, skip_special_tokens=False)
    return str(tokenizer.decode(found, skip_special_tokens=False))


def read(dialect: Dialect, functions: Mapping[str, Any], answer: str, prompt_end: str, most: int | None) -> Blocks:
    reader = dialect.reader(functions, prompt_end, most_calls=most)
    return Blocks([piece for part in [*answer] for piece in reader.push(part)] + reader.finish()).settled()


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("thinking", [None, "think", "opened"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_must_be_calls_is_calls(family: str, thinking: str | None, are_tokens: bool) -> None:
    known: Thinking | None = THINKING["think"] if thinking is not None else None
    dialect = Dialect(FAMILIES[family], known)
    marks = [mark for mark in dict.fromkeys(dialect.marks)] if are_tokens else []
    tokenizer, _ = tokenizer_of(tuple(marks))
    counts = set()
    for seed in range(4):
        rng = random.Random(f"{family}{thinking}{are_tokens}{seed}")
        names = rng.sample(sorted(FUNCTIONS), rng.randint(1, 3))
        functions = {name: FUNCTIONS[name] for name in names}
        is_one = seed % 2 == 0
        prompt_end = "assistant\n<think>\n" if thinking == "opened" else "assistant\n"
        grammar = dialect.calls_grammar(functions, prompt_end, tokenizer.token_to_id, is_one=is_one)
        assert refusal(Constraint(ConstraintKind.GRAMMAR, grammar)) is None
        answer = walk(grammar, marks, rng)
        blocks = read(dialect, functions, answer, prompt_end, 1 if is_one else None)
        found = blocks.of(Kind.CALL)
        assert found, answer
        assert blocks.text_of(Kind.TEXT) == "", answer
        assert len(found) == 1 or not is_one
        counts.add(len(found))
        for call in found:
            jsonschema.validate(json.loads(call.text), functions[call.name])
    assert counts <= {1} or FAMILIES[family].writing.between is not None


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.opening is not None])
def test_an_answer_may_be_calls_or_what_it_must_be(family: str) -> None:
    dialect, answer = Dialect(FAMILIES[family]), Constraint.json_schema(PLACE)
    functions = {"weather": PLACE, "free": OPEN}
    grammar = dialect.calls_grammar(functions, "", {}.get, is_one=False, answer=rule_of(answer, "answer"))
    kinds = set()
    for seed in range(12):
        blocks = read(dialect, functions, walk(grammar, [], random.Random(seed)), "", None)
        if text := blocks.text_of(Kind.TEXT):
            jsonschema.validate(json.loads(text), PLACE)
        assert bool(text) != blocks.has_whole_calls
        kinds.add(bool(text))
    assert kinds == {True, False}
    assert FAMILIES["llama"].opening is None


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.opening is not None])
def test_calls_of_strict_functions_are_kept_inside_free_text(family: str, are_tokens: bool) -> None:
    dialect = Dialect(FAMILIES[family], THINKING["think"])
    opening = FAMILIES[family].opening
    assert opening is not None
    marks = list(dict.fromkeys(dialect.marks)) if are_tokens else []
    tokenizer, _ = tokenizer_of(tuple(marks))
    texts, strict, free = 0, 0, 0
    for seed in range(10):
        rng = random.Random(f"{family}{are_tokens}{seed}")
        names = ["strings", rng.choice(["weather", "ns.walk-1", "free"])]
        functions = {name: FUNCTIONS[name] for name in names}
        is_one = seed % 3 == 0
        grammar = dialect.strict_grammar(functions, names[1:], "<think>", tokenizer.token_to_id, is_one=is_one)
        assert refusal(Constraint(ConstraintKind.GRAMMAR, grammar)) is None
        begun = f"so</think>{'It is. ' if seed % 2 else ''}{opening if seed else ''}"
        answer = walk(grammar, marks, rng, begun)
        blocks = read(dialect, functions, answer, "<think>", 1 if is_one else None)
        texts += bool(blocks.text_of(Kind.TEXT))
        found = blocks.of(Kind.CALL)
        assert len(found) <= 1 or not is_one
        for call in found:
            free += call.name == names[0]
            if call.name == names[1]:
                strict += 1
                jsonschema.validate(json.loads(call.text), functions[call.name])
    assert texts
    assert strict


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.opening is not None])
def test_a_strict_call_takes_nothing_but_its_schema(family: str) -> None:
    """And another function's takes what its schema has not; text without a call is any."""
    dialect, chosen = Dialect(FAMILIES[family]), FAMILIES[family]
    tokenizer, tokens = tokenizer_of(())
    grammar = dialect.strict_grammar({"weather": PLACE, "other": PLACE}, ["weather"], "", {}.get, is_one=False)

    def accepts(text: str) -> bool:
        made = grammar_of(Constraint(ConstraintKind.GRAMMAR, grammar))
        matcher = LLMatcher(tokens, made, log_level=0, limits=LIMITS)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.validate_tokens(ids) == len(ids)

    def call(name: str, given: Mapping[str, Any]) -> str:
        if family == "qwen-coder":
            body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        elif "gemma" in family:
            quote = chosen.marks[2]
            body = ",".join(f"{key}:{quote}{value}{quote}" for key, value in given.items()).join("{}")
        else:
            body = json.dumps(given)
        writing = chosen.writing
        return f"{writing.begin}{writing.head.replace('NAME', name)}{body}{writing.tail}{writing.end}"

    assert accepts('Well: {"name": 5} </tool_call> and so on.')
    good, bad = {"city": "Paris"}, {"town": "Paris"}
    assert accepts(f"Let me see.\n{call('weather', good)}")
    assert not accepts(f"Let me see.\n{call('weather', bad)}")
    assert accepts(f"{call('other', bad)}\nand\n{call('weather', good)} done")
    assert not accepts(call("third", good))


def test_a_mark_that_is_a_token_is_that_token() -> None:
    marks = Marks(["<think>", "[ARGS]", "<tool"], {"<think>": 7, "[ARGS]": 9}.get)
    assert marks.lark("<think>a[ARGS]<tool") == '<[7]> "a" <[9]> "<tool"'
    assert [*marks.text_to("t", "[ARGS]", "x/y")] == ["t: T <[9]>", r"T: /(?s:.*)/ & ~/(?s:.*(\[ARGS\]|x\/y).*)/"]
    assert [*marks.text_to("t", "<tool")] == ['t[suffix="<tool"]: /(?s:.*)/']


@pytest.mark.parametrize(
    ("family", "parameters", "words"),
    [
        ("hermes", {"type": "string"}, "f.parameters.type: must be object"),
        (
            "gemma",
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "properties.a.pattern: is not",
        ),
        ("gemma", {"properties": {"a": {"oneOf": []}}}, "f.parameters.properties.a.oneOf: is not supported"),
        ("gemma", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "leads nowhere"),
        ("gemma", {"properties": {"a": {"type": "array", "maxItems": 9999}}}, "properties.a.maxItems: must be"),
        ("gemma", {"properties": 5}, "f.parameters.properties: must be an object"),
        ("gemma", {"properties": {"a": {"enum": 5}}}, "f.parameters.properties.a.enum: must be a list"),
        ("gemma", {"properties": {"a": {"type": "array", "minItems": None}}}, "properties.a.minItems: must be"),
        ("qwen-coder", {"properties": {"a": {}}, "required": 5}, "f.parameters.required: must be a list"),
        ("qwen-coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern: is not"),
        ("qwen-coder", {"patternProperties": {}}, "f.parameters.patternProperties: is not supported"),
        ("qwen-coder", {"properties": {"a>": {}}}, "is no name that a tag can have"),
    ],
)
def test_what_cannot_be_kept_is_named(family: str, parameters: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Dialect(FAMILIES[family]).calls_grammar({"f": parameters}, "", {}.get, is_one=True)


def test_what_the_compiler_refuses_is_named_by_its_path() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    grammar = Dialect(FAMILIES["hermes"]).calls_grammar({"f": NOTHING, "g": parameters}, "", {}.get, is_one=True)
    found = refusal(Constraint(ConstraintKind.GRAMMAR, grammar))
    assert found is not None
    assert found.description == "in parameters_1: at 'properties.a.uniqueItems': is not supported"
