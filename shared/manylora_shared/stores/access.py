"""How a bucket is reached, as an operator writes it down: its endpoint, its region, and where its credentials are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from manylora_shared.process.config import environment
from manylora_shared.telemetry.logs import hide

SECRETS = ("access_key_id", "secret_access_key", "session_token")
NAMES = ("endpoint", "region", *SECRETS)
MAX_SECRET_BYTES = 1 << 16


def access_of(path: str) -> dict[str, str]:
    """The settings of a YAML file; empty: none. Raises ValueError, OSError."""
    if not path:
        return {}
    try:
        return read_access(yaml.safe_load(Path(path).read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {error}") from error


def read_access(written: Any) -> dict[str, str]:
    """Obstore's settings of what is written. Credentials are named, `env:NAME` or `file:PATH`, and hidden from logs.

    Raises ValueError, OSError.
    """
    if not isinstance(written, Mapping) or not all(isinstance(each, str) for each in written.values()):
        raise ValueError("must be a mapping of texts")
    unknown = sorted(set(written) - set(NAMES))
    if unknown:
        raise ValueError(f"{unknown[0]}: is not one of {', '.join(NAMES)}")
    return {name: secret_of(value, name) if name in SECRETS else value for name, value in written.items()}


def secret_of(reference: str, name: str) -> str:
    """Raises ValueError, OSError."""
    kind, _, where = reference.partition(":")
    if kind == "env":
        secret = environment().get(where, "")
    elif kind == "file":
        with Path(where).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES).decode().strip()
    else:
        raise ValueError(f"{name}: must be env:NAME or file:PATH, and never the secret itself")
    if not secret:
        raise ValueError(f"{name}: there is nothing in {reference}")
    hide(secret)
    return secret
