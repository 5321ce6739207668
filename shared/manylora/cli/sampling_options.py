"""An option of the command line for each sampling parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer
from manylora_shared.sampling import PARAMETERS, Kind, Parameter, Sampling

from manylora.cli.output import usage_error


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options in place of its keyword `sampling`. The router checks what fits the wire."""
    options = {row.name: (_option(row), None) for row in PARAMETERS}
    return with_options(
        command,
        "sampling",
        options,
        lambda asked: Sampling(**{row.name: _value(row, asked[row.name]) for row in PARAMETERS}),
    )


def with_options(
    command: Callable[..., None],
    keyword: str,
    options: Mapping[str, tuple[Any, Any]],
    value: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., None]:
    """options: type and default, by name, of what `value` makes the command's keyword of."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        asked = {name: given.pop(name) for name in options}
        command(**given, **{keyword: value(asked)})

    parameters = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]
    shown: list[inspect.Parameter] = []
    for each in parameters:
        shown += added if each.name == keyword else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run


def _option(row: Parameter) -> Any:
    help_ = row.meaning[0].upper() + row.meaning[1:]
    if row.kind in (Kind.NUMBER, Kind.COUNT) and row.default is not None:
        help_ += f"; default: {row.default:g}"
    match row.kind:
        case Kind.NUMBER:
            return Annotated[float | None, typer.Option(help=f"{help_}. {str(row.range).capitalize()}.")]
        case Kind.COUNT:
            low, high = int(row.range.low), int(row.range.high)
            return Annotated[int | None, typer.Option(min=low, max=high, help=f"{help_}.")]
        case Kind.TOKENS:
            return Annotated[list[int] | None, typer.Option(metavar="TOKEN_ID", help=f"{help_}; may be repeated.")]
        case Kind.WORDS:
            return Annotated[list[str] | None, typer.Option(metavar="TEXT", help=f"{help_}; may be repeated.")]
        case Kind.BIASES:
            return Annotated[list[str] | None, typer.Option(metavar="TOKEN_ID=BIAS", help=f"{help_}; may be repeated.")]


def _value(row: Parameter, given: Any) -> Any:
    if given is None:
        return row.default
    return dict(_biases(row.name, given)) if row.kind is Kind.BIASES else given


def _biases(name: str, entries: Iterable[str]) -> Iterable[tuple[int, float]]:
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            yield int(token_id), float(bias)
        except ValueError:
            raise usage_error(f"--{name.replace('_', '-')}: {entry!r} is not TOKEN_ID=BIAS") from None
