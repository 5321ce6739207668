"""From a setting to a sink."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from manylora_shared.ledger_sinks.base import Sink
from manylora_shared.ledger_sinks.sqlite import SqliteSink
from manylora_shared.stores.access import secret_of

if TYPE_CHECKING:
    from manylora_shared.ledger_sinks.jetstream import Forwarder

FORMS = "sqlite:FILE, parquet:FOLDER or postgresql:REFERENCE"
_BESIDE = ("sqlite", "parquet")  # sinks that lie on this machine, where the log may lie beside them


def open_sink(place: str, via: str = "") -> Sink:
    """via: what brings rows there; empty: this process does. Raises ValueError, OSError."""
    sink = _open(place)
    if not via:
        return sink
    reference = nats_reference(via, "--ledger-via")
    through: Sink = _jetstream().JetStreamSink(lambda: secret_of(reference, "--ledger-via"), sink)
    return through


def open_forwarder(place: str, via: str) -> Forwarder:
    """Raises ValueError, OSError."""
    reference = nats_reference(via, "--from")
    forwarder: Forwarder = _jetstream().Forwarder(lambda: secret_of(reference, "--from"), _open(place))
    return forwarder


def nats_reference(via: str, option: str) -> str:
    """Where the URL is that `via` names, which may have a password. Raises ValueError, OSError."""
    kind, _, reference = via.partition(":")
    if kind != "nats" or reference.startswith("//"):
        raise ValueError(f"{option}: must be nats:env:NAME, nats:file:PATH or nats:vault:PATH#FIELD, where the URL is")
    secret_of(reference, option)
    return reference


def _open(place: str) -> Sink:
    kind, _, where = place.partition(":")
    match kind if where else "":
        case "sqlite":
            return SqliteSink(Path(where))
        case "parquet":
            return _parquet(Path(where))
        case "postgresql" | "postgres":
            return _postgres(where)
    raise ValueError(f"--ledger: {_shown(place)!r} is not {FORMS}")


def log_folder(place: str) -> Path | None:
    """Where the routers' logs lie beside the sink; None: it is not on this machine."""
    kind, _, where = place.partition(":")
    return Path(where).absolute().parent / "ledger-log" if kind in _BESIDE else None


def _jetstream() -> ModuleType:
    try:
        from manylora_shared.ledger_sinks import jetstream
    except ImportError:
        raise ValueError("nats: needs nats-py: pip install 'manylora[nats]'") from None
    return jetstream


def _parquet(folder: Path) -> Sink:
    try:
        from manylora_shared.parquet.usage_files import ParquetSink
    except ImportError:
        raise ValueError("--ledger parquet: needs pyarrow: pip install 'manylora[parquet]'") from None
    return ParquetSink(folder)


def _postgres(reference: str) -> Sink:
    if reference.startswith("//"):
        message = "a connection string has a password, which is never on a command line"
        raise ValueError(
            f"--ledger: {message}: give postgresql:env:NAME, postgresql:file:PATH or postgresql:vault:PATH#FIELD"
        )
    try:
        from manylora_shared.ledger_sinks.postgres import PostgresSink, checked
    except ImportError:
        raise ValueError("--ledger postgresql: needs psycopg: pip install 'manylora[postgresql]'") from None
    checked(secret_of(reference, "--ledger"))
    return PostgresSink(lambda: secret_of(reference, "--ledger"))


def _shown(place: str) -> str:
    """Without what may be a secret."""
    return place.partition("://")[0] if "://" in place else place
