"""Which key service an operator names: `local:FILE`, `aws-kms:ARN`, `vault:URL#KEY`; and how it is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from manylora_shared.encryption.aws_kms import AwsKeys
from manylora_shared.encryption.key_service import KeyService, LocalKeys
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.encryption.sealing import NoKeys, OpeningKeys
from manylora_shared.encryption.vault import Vault, VaultKeys
from manylora_shared.process.config import ConfigError, setting
from manylora_shared.process.settings import ServiceSettings
from manylora_shared.stores.access import read_yaml, secret_of

KINDS = ("local", "aws-kms", "vault")
_AWS = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")
_AWS_SECRETS = _AWS[2:]
_VAULT = ("token", "ca", "mount")
_VAULT_TOKEN = "env:VAULT_TOKEN"


@dataclass(frozen=True, kw_only=True)
class SealingSettings(ServiceSettings):
    """Of services that read or write what is sealed."""

    encryption: str = setting(
        "", "who wraps data keys: local:FILE, aws-kms:ARN or vault:URL#KEY; empty: nothing is sealed"
    )
    encryption_access: str = setting(
        "", "YAML file with what the key service asks for, secrets by reference; empty: AWS_* or VAULT_TOKEN"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, rest = self.encryption.partition(":")
        if self.encryption and (kind not in KINDS or not rest):
            raise ConfigError("--encryption: must be local:FILE, aws-kms:ARN or vault:URL#KEY")
        if self.encryption_access and (not self.encryption or kind == "local"):
            raise ConfigError("--encryption-access: goes with --encryption aws-kms:... or vault:...")

    def keyring(self) -> Keyring | None:
        """None: nothing is sealed. Raises ConfigError."""
        if not self.encryption:
            return None
        try:
            return Keyring(key_service_of(self.encryption, self.encryption_access))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--encryption {self.encryption}: {error}") from error


def opening_keys(keyring: Keyring | None) -> OpeningKeys:
    return keyring if keyring is not None else NoKeys()


def key_service_of(written: str, access: str) -> KeyService:
    """Raises ValueError, OSError."""
    kind, _, rest = written.partition(":")
    found = read_yaml(access) if access else {}
    if kind == "local":
        return LocalKeys(Path(rest).expanduser())
    if kind == "aws-kms":
        _check(found, _AWS)
        return AwsKeys(rest, {k: secret_of(v, k) if k in _AWS_SECRETS else v for k, v in found.items()})
    _check(found, _VAULT)
    url, _, name = rest.partition("#")
    token = partial(secret_of, found.get("token", _VAULT_TOKEN), "token")
    token()  # said now, not when the first tenant calls
    return VaultKeys(Vault(url, token, ca=found.get("ca", "")), name, mount=found.get("mount", "transit"))


def _check(found: Mapping[str, str], names: tuple[str, ...]) -> None:
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ValueError(f"{unknown[0]}: is not one of {', '.join(names)}")
