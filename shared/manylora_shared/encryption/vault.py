"""HashiCorp Vault, and OpenBao: the transit engine as a KeyService, and secrets of its key-value engine."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from manylora_shared.encryption.key_service import KeyServiceUnavailable, Wrapped, context_of
from manylora_shared.encryption.sealing import Sealed

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_KEY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_VERSION = re.compile(r"vault:v(\d+):")


class VaultRefuses(Exception):
    """status: HTTP's."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


class Vault:
    """token: read anew for every call, so that a renewed one in a file is taken."""

    def __init__(self, url: str, token: Callable[[], str], *, ca: str = "") -> None:
        """Raises ValueError, OSError."""
        if not url.startswith(("https://", "http://")):
            raise ValueError("must be https://HOST:PORT, or http:// on this machine")
        self._url = url.rstrip("/")
        self._token = token
        self._tls = ssl.create_default_context(cafile=ca or None) if url.startswith("https:") else None

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Raises VaultRefuses, KeyServiceUnavailable."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/{path}", data, method=method)
        request.add_header("X-Vault-Token", self._token())
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls) as answer:
                text = answer.read(_MAX_ANSWER_BYTES)
            return json.loads(text) if text else {}
        except urllib.error.HTTPError as error:
            with error:
                raise VaultRefuses(error.code, f"Vault answers {error.code} to {path}") from None
        except (OSError, ValueError) as error:
            raise KeyServiceUnavailable(f"Vault does not answer: {type(error).__name__}") from None


class VaultKeys:
    """A key of the transit engine, of a kind that takes associated data (aes256-gcm96, which is its default)."""

    def __init__(self, vault: Vault, name: str, *, mount: str = "transit") -> None:
        """Raises ValueError."""
        if not _KEY_NAME.fullmatch(name):
            raise ValueError("the name of Vault's key, behind '#', must be of letters, digits, '_', '.' and '-'")
        self._vault = vault
        self._name = name
        self._mount = mount

    def wrap(self, secret: bytes, owner: str) -> Wrapped:
        body = {"plaintext": base64.b64encode(secret).decode(), "associated_data": _bound(owner)}
        text = str(self._call("POST", f"encrypt/{self._name}", body)["ciphertext"])
        return Wrapped(self._version(text), text.encode())

    def unwrap(self, wrapped: Wrapped, owner: str) -> bytes:
        body = {"ciphertext": wrapped.data.decode(), "associated_data": _bound(owner)}
        return base64.b64decode(self._call("POST", f"decrypt/{self._name}", body, is_data=True)["plaintext"])

    def current(self) -> str:
        return f"{self._name}:v{self._latest()}"

    def rotate(self) -> None:
        self._call("POST", f"keys/{self._name}/rotate", {})

    def forget_others(self) -> bool:
        """Vault opens no older version any more; `trim` there removes them for good."""
        self._call("POST", f"keys/{self._name}/config", {"min_decryption_version": self._latest()})
        return True

    def _latest(self) -> int:
        return int(self._call("GET", f"keys/{self._name}")["latest_version"])

    def _version(self, text: str) -> str:
        found = _VERSION.match(text)
        return f"{self._name}:v{found[1]}" if found else self._name

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, is_data: bool = False) -> Any:
        try:
            return self._vault.call(method, f"{self._mount}/{path}", body).get("data", {})
        except VaultRefuses as refused:
            if is_data and refused.status == 400:
                raise Sealed(
                    "Vault does not open a data key: it is another owner's, or another key wrapped it"
                ) from None
            raise KeyServiceUnavailable(str(refused)) from None


def _bound(owner: str) -> str:
    return base64.b64encode(json.dumps(context_of(owner), sort_keys=True).encode()).decode()
