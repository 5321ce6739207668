"""Secrets by reference, and how a bucket is reached: its endpoint, its region, and where its credentials are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from manylora_shared.encryption.vault import Vault, VaultRefuses
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.process.config import environment
from manylora_shared.telemetry.logs import hide

SECRETS = ("access_key_id", "secret_access_key", "session_token")
NAMES = ("endpoint", "region", *SECRETS)
MAX_SECRET_BYTES = 1 << 16


def access_of(path: str) -> dict[str, str]:
    """The settings of a YAML file; empty: none. Raises ValueError, OSError."""
    return read_access(read_yaml(path)) if path else {}


def read_yaml(path: str) -> dict[str, str]:
    """A file's mapping of texts. Raises ValueError, OSError."""
    try:
        written = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {error}") from error
    if not isinstance(written, Mapping) or not all(isinstance(each, str) for each in written.values()):
        raise ValueError("must be a mapping of texts")
    return {str(name): value for name, value in written.items()}


def read_access(written: Any) -> dict[str, str]:
    """Obstore's settings of what is written. Credentials are named (`secret_of`), and hidden from logs.

    Raises ValueError, OSError.
    """
    if not isinstance(written, Mapping) or not all(isinstance(each, str) for each in written.values()):
        raise ValueError("must be a mapping of texts")
    unknown = sorted(set(written) - set(NAMES))
    if unknown:
        raise ValueError(f"{unknown[0]}: is not one of {', '.join(NAMES)}")
    return {name: secret_of(value, name) if name in SECRETS else value for name, value in written.items()}


def secret_of(reference: str, name: str) -> str:
    """`env:NAME`, `file:PATH`, or `vault:PATH#FIELD` of the Vault at VAULT_ADDR. Raises ValueError, OSError."""
    kind, _, where = reference.partition(":")
    if kind == "env":
        secret = environment().get(where, "")
    elif kind == "file":
        with Path(where).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES).decode().strip()
    elif kind == "vault":
        secret = _of_vault(where, name)
    else:
        raise ValueError(f"{name}: must be env:NAME, file:PATH or vault:PATH#FIELD, and never the secret itself")
    if not secret:
        raise ValueError(f"{name}: there is nothing in {reference}")
    hide(secret)
    return secret


def _of_vault(where: str, name: str) -> str:
    """Of the key-value engine, whose path is written as its HTTP API has it: `secret/data/bucket#key`."""
    path, _, field = where.partition("#")
    variables = environment()
    token_file = variables.get("VAULT_TOKEN_FILE", "")
    token = secret_of(f"file:{token_file}" if token_file else "env:VAULT_TOKEN", "VAULT_TOKEN")
    try:
        vault = Vault(variables.get("VAULT_ADDR", ""), lambda: token, ca=variables.get("VAULT_CACERT", ""))
    except ValueError as error:
        raise ValueError(f"{name}: VAULT_ADDR: {error}") from None
    try:
        found = vault.call("GET", path).get("data", {})
    except (VaultRefuses, ServiceUnavailable) as error:
        raise ValueError(f"{name}: vault:{where}: {error}") from None
    found = found.get("data", found)  # the second version of the engine has one more level
    return str(found.get(field, "")) if isinstance(found, Mapping) else ""
