"""What a plan is made of, read from files: packaged curves, mixes, the ledger, a model's config.json."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from manylora.capacity.planning.curve import Curve, curve_of, find_curve, with_fp8_kv, with_quantization
from manylora.capacity.planning.shapes import CONFIGS, CannotPlan, Shape, gpu_of, shape_of
from manylora.capacity.planning.sums import with_ranks
from manylora.load.planning.arrivals import TraceRow
from manylora.load.planning.fields import UNREADABLE_YAML, BadMix
from manylora.load.planning.mix import Mix, mix_of

CURVES = Path(__file__).parent / "curves.json"
_MOST_ROWS = 1_000_000  # of a ledger's, the newest
_COLUMNS = (
    "tenant",
    "qos_class",
    "adapter",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "unread_tokens",
    "began_unix_s",
)
_SQLITE = b"SQLite format 3\0"


def packaged_curves() -> list[Curve]:
    return [curve_of(document) for document in json.loads(CURVES.read_text(encoding="utf-8"))]


def read_curve(file: Path) -> Curve:
    """One that `bench/plan_check.py` has measured. Raises CannotPlan."""
    try:
        return curve_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CannotPlan(f"{file}: is no curve: {type(error).__name__}: {error}") from None


def read_shape(name: str, quantization: str = "none", ranks: int = 1) -> Shape:
    """A known shape's, or a folder's with a config.json. Raises CannotPlan."""
    if name in CONFIGS:
        return shape_of(CONFIGS[name], name, quantization, ranks)
    config = Path(name) / "config.json"
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        known = ", ".join(CONFIGS)
        raise CannotPlan(f"{name!r} is none of {known}, and no model's folder: {config}: {error}") from None
    if not isinstance(document, dict):
        raise CannotPlan(f"{config}: must be an object")
    if quantization == "int4" and not document.get("quantization_config"):
        raise CannotPlan(f"{config}: --quantization int4 keeps what a checkpoint ships; this model is not quantized")
    return shape_of(document, Path(name).name, quantization, ranks)


def read_steps(
    model: str, gpu: str, file: Path | None, quantization: str = "none", *, ranks: int = 1, fp8_kv: bool = False
) -> Curve:
    """Of a model on that GPU, or by a curve of one's own. Raises CannotPlan."""
    shape, packaged = read_shape(model), packaged_curves()
    steps = find_curve(packaged, gpu_of(gpu), shape) if file is None else read_curve(file)
    if steps.shape != shape:
        raise CannotPlan(f"{file}: is of {steps.shape.name}, not of {shape.name}")
    if quantization != "none":
        steps = with_quantization(steps, read_shape(model, quantization), packaged)
    if ranks > 1:
        steps = with_ranks(steps, read_shape(model, quantization, ranks), packaged)
    return with_fp8_kv(steps) if fp8_kv else steps


def read_mix(text: str, name: str) -> Mix:
    """Raises CannotPlan."""

    def no_trace(file: str) -> tuple[TraceRow, ...]:
        raise BadMix(f"{file}: traces are sent by `manylora load`; plan one from the ledger of such a run")

    try:
        documents = list(yaml.safe_load_all(text))
    except UNREADABLE_YAML as error:
        raise CannotPlan(f"{name}: is no YAML: {' '.join(str(error).split())}") from None
    try:
        if any(isinstance(each, dict) and "tenant_id" in each for each in documents):
            raise CannotPlan(
                f"{name}: is tenants' policies; --tenants takes a mix of traffic, as `manylora load` sends it"
            )
        if len(documents) > 1:
            raise CannotPlan(f"{name}: has {len(documents)} documents; a mix is one")
        return mix_of(documents[0] if documents else None, no_trace)
    except BadMix as error:
        raise CannotPlan(f"{name}: {error}") from None


def read_ledger(file: Path) -> Sequence[Mapping[str, Any]]:
    """The ledger's SQLite file, or what `manylora usage --format json` printed. Raises CannotPlan."""
    try:
        with file.open("rb") as opened:
            is_sqlite = opened.read(len(_SQLITE)) == _SQLITE
        return _from_sqlite(file) if is_sqlite else _from_json(file)
    except (OSError, UnicodeDecodeError, sqlite3.Error) as error:
        raise CannotPlan(f"{file}: cannot be read: {error}") from None


def _from_sqlite(file: Path) -> Sequence[Mapping[str, Any]]:
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        columns = ", ".join(_COLUMNS)
        newest = f"SELECT {columns} FROM usage ORDER BY ended_unix_s DESC LIMIT {_MOST_ROWS}"
        return [dict(row) for row in connection.execute(newest)]


def _from_json(file: Path) -> Sequence[Mapping[str, Any]]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CannotPlan(f"{file}: is neither SQLite nor JSON: {error}") from None
    if not isinstance(document, list) or not all(isinstance(row, dict) for row in document):
        raise CannotPlan(f"{file}: must be a list of rows, as `manylora usage --format json` prints them")
    return document
