"""From a setting to a sink."""

from __future__ import annotations

from pathlib import Path

from manylora_shared.ledger_sinks.base import Sink
from manylora_shared.ledger_sinks.sqlite import SqliteSink

_SQLITE = "sqlite:"


def open_sink(place: str) -> Sink:
    """Raises ValueError."""
    if place.startswith(_SQLITE) and len(place) > len(_SQLITE):
        return SqliteSink(Path(place.removeprefix(_SQLITE)))
    raise ValueError(f"--ledger: {place!r} is not sqlite:FILE")


def log_folder(place: str) -> Path | None:
    """Where the routers' logs lie beside the sink; None: it is not on this machine."""
    if place.startswith(_SQLITE):
        return Path(place.removeprefix(_SQLITE)).absolute().parent / "ledger-log"
    return None
