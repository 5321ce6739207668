"""How an answer's text is scored against what its sample expects. Knows nothing of models.

What a tenant's pattern or schema may cost is not bounded here: judge_process.py runs those in a process with a limit.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import referencing
from manylora_shared.tenancy.adapter_gate import Judge

COSTLY = frozenset({Judge.REGEX, Judge.JSON_SCHEMA})


def score(judge: str, expected: Any, answer: str) -> float:
    """Raises ValueError where what is expected makes no sense."""
    match judge:
        case Judge.EXACT:
            return float(answer.strip() == expected.strip())
        case Judge.CONTAINS:
            return float(expected in answer)
        case Judge.JSON:
            return float(_json_of(answer)[0])
        case Judge.REGEX:
            try:
                return float(re.fullmatch(expected, answer) is not None)
            except (re.error, RecursionError, OverflowError) as e:
                raise ValueError(f"the pattern is none: {e}") from e
        case Judge.JSON_SCHEMA:
            return _fits(expected, answer)
    raise ValueError(f"{judge} scores no text")


def _json_of(answer: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(answer)
    except (ValueError, RecursionError):
        return False, None


def _fits(schema: Any, answer: str) -> float:
    is_json, document = _json_of(answer)
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        # a registry of its own: nothing that the schema refers to is fetched
        return float(is_json and kind(schema, registry=referencing.Registry()).is_valid(document))
    except Exception as e:  # the schema is a tenant's, and the library raises whatever comes of it
        raise ValueError(f"the schema cannot be used: {(str(e) or repr(e)).splitlines()[0]}") from e
