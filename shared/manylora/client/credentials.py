"""Which key a client presents where it was given none. Owns the notes that name a local cluster's key file: one a
router address in the user's state folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from manylora_shared.process.config import environment
from manylora_shared.transport.tls import SYSTEM_CA, Tls, TlsFiles

from manylora.client.routers import addresses

KEY_VARIABLE = "MANYLORA_KEY"
CA_VARIABLE = "MANYLORA_TLS_CA"
_MAX_KEY_CHARS = 256


def find_key(server: str) -> str:
    """server: of a Client. Empty where none is found. Raises OSError where a noted key file cannot be read."""
    key = environment().get(KEY_VARIABLE, "").strip()
    if key:
        return key
    noted = _noted(server)
    return read_key(noted[0]) if noted and noted[0].exists() else ""


def find_ca(server: str) -> str:
    """As `find_key`; empty: plain text."""
    given = environment().get(CA_VARIABLE, "").strip()
    if given:
        return given
    noted = _noted(server)
    return str(noted[1]) if len(noted) > 1 else ""


def trusting(ca: str) -> Tls | None:
    """What `find_ca` gave. Raises TlsError."""
    if not ca:
        return None
    return Tls(TlsFiles(ca=None if ca == SYSTEM_CA else Path(ca)))


def _noted(server: str) -> list[Path]:
    """The files of the key and, where it has TLS, of the authority of a local cluster; empty: none is known there.
    Several routers are one cluster's, or no key is: it must not go to another's.
    """
    notes = {_read_note(address) for address in addresses(server)}
    return [Path(line) for line in notes.pop()] if len(notes) == 1 else []


def _read_note(address: str) -> tuple[str, ...]:
    try:
        return tuple(_note(address).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()


def read_key(path: Path) -> str:
    """Raises OSError."""
    with path.open(encoding="ascii", errors="replace") as file:
        return file.read(_MAX_KEY_CHARS).strip()


def write_note(server: str, key_file: Path, ca_file: Path | None = None) -> None:
    """Raises OSError."""
    note = _note(server)
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    draft.write_text("\n".join(str(path) for path in (key_file, ca_file) if path is not None), encoding="utf-8")
    draft.replace(note)


def remove_note(server: str, key_file: Path) -> None:
    """Unless another cluster took it over. Raises OSError."""
    note = _note(server)
    if _noted(server)[:1] == [key_file]:
        note.unlink()


def _note(server: str) -> Path:
    env = environment()
    state = Path(env["XDG_STATE_HOME"]) if env.get("XDG_STATE_HOME") else Path.home() / ".local" / "state"
    host, _, port = server.rpartition(":")
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{_LOCAL.get(host, host)}_{port}")
    return state / "manylora" / "clusters" / name


_LOCAL = {"localhost": "127.0.0.1", "": "127.0.0.1"}
