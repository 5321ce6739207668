"""Options for what the text of an answer must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from manylora_shared.constraints.constraint import Constraint

from manylora.cli.files import name_of, read_file
from manylora.cli.output import usage_error
from manylora.cli.sampling_options import with_options

ANY_OBJECT = "json"

ResponseFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|json",
        help="The answer is JSON: of the JSON schema (or OpenAI's response_format) in the file, or any object.",
    ),
]
Regex = Annotated[str | None, typer.Option(metavar="PATTERN", help="The whole answer matches it.")]
Choices = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="The answer is this text, or another's; may be repeated.")
]
GrammarFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The answer is of this grammar, in Lark (llguidance's) or GBNF.")
]


def with_constraint_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options in place of its keyword `constraint`."""
    options = {"response_format": (ResponseFormat, None), "regex": (Regex, None), "choice": (Choices, None)}
    return with_options(
        command, "constraint", {**options, "grammar": (GrammarFile, None)}, lambda asked: constraint_of(**asked)
    )


def constraint_of(
    *, response_format: str | None, regex: str | None, choice: Sequence[str] | None, grammar: Path | None
) -> Constraint | None:
    options = {"--response-format": response_format, "--regex": regex, "--choice": choice, "--grammar": grammar}
    given = [name for name, value in options.items() if value not in (None, [])]
    if not given:
        return None
    if len(given) > 1:
        raise usage_error(f"{' and '.join(given)}: an answer has one constraint; give one of them")
    found = Constraint.json_object()
    if regex is not None:
        found = Constraint.regex(regex)
    elif choice:
        found = Constraint.of_choices(choice)
    elif grammar is not None:
        found = Constraint.grammar(read_file(grammar))
    elif response_format is not None and response_format != ANY_OBJECT:
        found = Constraint.json_schema(_schema(response_format))
    for violation in found.violations():
        raise usage_error(f"{given[0]}: {violation.description}")
    return found


def _schema(argument: str) -> dict[str, Any]:
    file = Path(argument)
    if str(file) != "-" and not file.is_file():
        raise usage_error(f"--response-format: there is no file {argument}; give one with a JSON schema, or `json`")
    try:
        document = json.loads(read_file(file))
    except ValueError as error:
        raise usage_error(f"--response-format: {name_of(file)} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise usage_error(f"--response-format: {name_of(file)} must be a JSON object, a schema")
    if document.get("type") == "json_schema":
        inner = document.get("json_schema", document)
        document = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(document, dict):
            raise usage_error(f"--response-format: {name_of(file)} has no json_schema.schema")
    return document
