"""The W3C traceparent: the text by which a trace goes on in another process."""

from __future__ import annotations

import re

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)


def trace_id_of(traceparent: str) -> str:
    """32 hex digits; empty where there is none."""
    parts = split(traceparent)
    return f"{parts[0]:032x}" if parts is not None else ""


def split(traceparent: str) -> tuple[int, int, int] | None:
    """W3C Trace Context 1, section 3.2. None: it is malformed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"] is not None):
        return None
    trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
    return (trace_id, span_id, int(match["flags"], 16)) if trace_id and span_id else None
