"""Logs: one JSON object a line on stderr. Owns the process's root logger once `setup` was called: what libraries log
passes here too. Prompts, answers, token ids, keys and secrets are never logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
from dataclasses import dataclass
from typing import Any, TextIO

from manylora_shared.telemetry.redaction import Redaction
from manylora_shared.telemetry.traceparent import trace_id_of

MAX_LINES = 100  # of one place in the code, in WINDOW_S
WINDOW_S = 10.0
MAX_MESSAGE_CHARS = 4096
MAX_FIELD_CHARS = 1024
MAX_EXCEPTION_CHARS = 8192
_MAX_ITEMS = 16  # of a field that is a list
_MAX_PLACES = 1024

_KEY = "manylora_fields"
_LEFT_OUT = "manylora_left_out"
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
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # What nobody catches would be printed as it is.
    sys.excepthook = lambda kind, error, trace: root.critical("not caught", exc_info=error)
    threading.excepthook = lambda told: root.critical("not caught in a thread", exc_info=told.exc_value)
    sys.unraisablehook = lambda told: root.error("%s", told.err_msg or "ignored", exc_info=told.exc_value)


def hide(secret: str, *, is_passing: bool = False) -> None:
    """No line of this process shows it from now on; one that is passing, until many others have followed."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.redaction.hide(secret, is_passing=is_passing)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """The stream is broken, and logging would print the record there as it is."""


class RateLimit(logging.Filter):
    """Of each place that logs, its first MAX_LINES in a window; the next one tells how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int, str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.name, record.levelno, record.pathname, record.lineno)
        window = self._places.get(place)
        if window is None:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            window = self._places[place] = _Window(record.created)
        if not 0 <= record.created - window.start_unix_s < WINDOW_S:
            window.start_unix_s, window.lines = record.created, 0
        window.lines += 1
        if window.lines > MAX_LINES:
            window.left_out += 1
            return False
        if window.left_out:
            setattr(record, _LEFT_OUT, window.left_out)
            window.left_out = 0
        return True


@dataclass
class _Window:
    start_unix_s: float
    lines: int = 0
    left_out: int = 0  # since the last line that was written


class JsonFormatter(logging.Formatter):
    """Every text of a line is redacted and bounded, whoever logs it."""

    def __init__(self, service: str, instance_id: str = "") -> None:
        super().__init__()
        self._constant = {"service": service} | ({"instance": instance_id} if instance_id else {})
        self.redaction = Redaction()

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            **self._constant,
            "logger": record.name,
            "message": self._cleaned(_message_of(record), MAX_MESSAGE_CHARS),
        }
        for name, value in getattr(record, _KEY, {}).items():
            line.setdefault(name, self._cleaned(value, MAX_FIELD_CHARS))
        if (left_out := getattr(record, _LEFT_OUT, 0)) > 0:
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self._cleaned(self.formatException(record.exc_info), MAX_EXCEPTION_CHARS)
        return json.dumps(line)

    def _cleaned(self, value: object, limit: int) -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [self._cleaned(each, limit // _MAX_ITEMS) for each in value[:_MAX_ITEMS]]
        return self.redaction.clean(value if isinstance(value, str) else str(value), limit)


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as e:
        return f"{record.msg} [its arguments do not fit: {e}]"
