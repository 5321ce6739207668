"""Files that commands are given; `-` is stdin."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from manylora.cli.output import usage_error


def name_of(file: Path) -> str:
    return "stdin" if str(file) == "-" else str(file)


def read_file(file: Path) -> str:
    """Where it cannot be read, the command was called wrongly."""
    try:
        # stdin as bytes too: as text it takes what is no UTF-8, and that cannot be sent.
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(f"{name_of(file)}: cannot be read: {error}") from None
