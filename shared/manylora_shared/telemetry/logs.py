"""Logs: one JSON object a line on stderr. Owns the process's root logger once `setup` was called. Prompts, answers and
token ids are never logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

from manylora_shared.telemetry.traceparent import trace_id_of

_KEY = "manylora_fields"
# a tenant's content, or secrets
_FORBIDDEN = frozenset({"prompt", "text", "completion", "messages", "token_ids", "prompt_token_ids", "authorization"})


def fields(*, traceparent: str = "", **values: object) -> dict[str, Any]:
    """`traceparent` becomes trace_id and span_id; empty strings and None are left out."""
    forbidden = _FORBIDDEN & values.keys()
    assert not forbidden, f"never logged: {sorted(forbidden)}"
    found = {name: value for name, value in values.items() if value is not None and value != ""}
    if trace_id := trace_id_of(traceparent):
        found |= {"trace_id": trace_id, "span_id": traceparent.split("-")[2]}
    return {_KEY: found}


def setup(service: str, level: str = "info", *, instance_id: str = "", stream: TextIO | None = None) -> None:
    """Replaces earlier handlers. Raises ValueError where `level` is not debug, info, warning or error."""
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"--log-level: {level!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str, instance_id: str = "") -> None:
        super().__init__()
        self._constant = {"service": service} | ({"instance": instance_id} if instance_id else {})

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            **self._constant,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, _KEY, {}).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
