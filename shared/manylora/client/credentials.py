"""Which key a client presents where it was given none. Owns the notes that name a local cluster's key file: one a
router address in the user's state folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from manylora_shared.process.config import environment

KEY_VARIABLE = "MANYLORA_KEY"
_MAX_KEY_CHARS = 256


def find_key(server: str) -> str:
    """Empty where none is found. Raises OSError where a noted key file cannot be read."""
    key = environment().get(KEY_VARIABLE, "").strip()
    if key:
        return key
    try:
        path = Path(_note(server).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""  # no note: no local cluster is known at this address
    return read_key(path) if path.exists() else ""


def read_key(path: Path) -> str:
    """Raises OSError."""
    with path.open(encoding="ascii", errors="replace") as file:
        return file.read(_MAX_KEY_CHARS).strip()


def write_note(server: str, key_file: Path) -> None:
    """Raises OSError."""
    note = _note(server)
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    draft.write_text(str(key_file), encoding="utf-8")
    draft.replace(note)


def remove_note(server: str, key_file: Path) -> None:
    """Unless another cluster took it over. Raises OSError."""
    note = _note(server)
    if note.exists() and note.read_text(encoding="utf-8") == str(key_file):
        note.unlink()


def _note(server: str) -> Path:
    env = environment()
    state = Path(env["XDG_STATE_HOME"]) if env.get("XDG_STATE_HOME") else Path.home() / ".local" / "state"
    host, _, port = server.rpartition(":")
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{_LOCAL.get(host, host)}_{port}")
    return state / "manylora" / "clusters" / name


_LOCAL = {"localhost": "127.0.0.1", "": "127.0.0.1"}
