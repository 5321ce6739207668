"""Lines of a trace to its rows: a CSV with a header (Azure's public traces), or JSON lines (Mooncake's)."""

from __future__ import annotations

import csv
import datetime
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from manylora.load.planning.arrivals import TraceRow
from manylora.load.planning.fields import BadMix
from manylora.load.planning.sizes import MAX_TOKENS

_TIMES = ("timestamp", "arrived_at", "at_s", "time")
_PROMPTS = ("contexttokens", "input_length", "prompt_tokens", "input_tokens")
_OUTPUTS = ("generatedtokens", "output_length", "output_tokens")
Record: TypeAlias = Callable[[], Mapping[str, Any]]  # or ValueError
_MS_FORM = "input_length"  # who names prompts so counts milliseconds


def rows_of(lines: Iterable[str], name: str) -> tuple[TraceRow, ...]:
    """In order of time, which begins at 0. Raises BadMix, naming the line."""
    rows = iter(lines)
    first = next(rows, "")
    all_lines = itertools.chain([first], rows)
    found: list[TraceRow] = []
    for number, record in _of_json(all_lines) if first.lstrip().startswith("{") else _of_csv(all_lines):
        try:
            found.append(_row(record()))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadMix(f"{name}: line {number}: {error}") from None
    if not found:
        raise BadMix(f"{name}: has no requests")
    found.sort(key=lambda row: row.at_s)
    begins_s = found[0].at_s
    return tuple(replace(row, at_s=row.at_s - begins_s) for row in found)


def _of_json(lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, functools.partial(json.loads, line)


def _of_csv(lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
    reader = csv.DictReader(lines)
    for row in reader:
        values = {str(name).strip().lower(): value for name, value in row.items()}
        yield reader.line_num, lambda values=values: values  # type: ignore[misc]


def _row(record: Mapping[str, Any]) -> TraceRow:
    prompt, output = int(_first(record, _PROMPTS)), int(_first(record, _OUTPUTS))
    if not (0 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS):
        raise ValueError(f"a count of tokens is not between 0 and {MAX_TOKENS}")
    at_s = _seconds(_first(record, _TIMES)) / (1000 if _MS_FORM in record else 1)
    if not math.isfinite(at_s):
        raise ValueError("its time is not finite")
    return TraceRow(at_s, max(1, prompt), max(1, output), tuple(int(each) for each in record.get("hash_ids") or ()))


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise ValueError(f"has none of the fields {', '.join(names)}")


def _seconds(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        moment = datetime.datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
