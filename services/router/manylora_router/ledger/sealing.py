"""How a log of the ledger is sealed: AES-256-GCM under a key of the log's own, which lies in its folder, sealed under
the cluster's data key. So a record is written without asking anybody for a key.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.sealing import KEY_BYTES, SALT_BYTES, NoKeys, SealingKeys, open_bytes, seal
from manylora_shared.ledger.frames import NoSeal, Seal

KEY_FILE = "key.sealed"
_NONCE_BYTES = 12  # the number of the record


class LogSeal:
    def __init__(self, secret: bytes) -> None:
        self._aead = AESGCM(secret)
        self._number = 0

    def close(self, plain: bytes) -> bytes:
        self._number += 1
        nonce = self._number.to_bytes(_NONCE_BYTES, "big")
        return nonce + self._aead.encrypt(nonce, plain, None)

    def open(self, sealed: bytes) -> bytes:
        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except InvalidTag:
            raise ValueError("the ledger's log has a record that was not written by its router") from None


class LogSeals:
    """Of this router's log (`own`), and of those that it finds. keys: None: its own is in the clear."""

    def __init__(self, keys: SealingKeys | None) -> None:
        self._keys = keys
        self._secret = secrets.token_bytes(KEY_BYTES)
        self.own: Seal = LogSeal(self._secret) if keys is not None else NoSeal()

    def keep(self, folder: Path) -> None:
        """Before the first row; blocks. Raises ServiceUnavailable, OSError."""
        if self._keys is None:
            return
        salt = secrets.token_bytes(SALT_BYTES)
        data = seal(self._secret, folder.name, self._keys.sealing(CLUSTER), salt)
        part = folder / f"{KEY_FILE}.part"
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(folder / KEY_FILE)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def of(self, folder: Path) -> Seal:
        """Blocks. Raises Sealed, SealBroken, ServiceUnavailable, OSError."""
        try:
            data = (folder / KEY_FILE).read_bytes()
        except FileNotFoundError:
            return NoSeal()
        return LogSeal(open_bytes(data, folder.name, self._keys or NoKeys()))


def remove_key(folder: Path) -> None:
    for name in (KEY_FILE, f"{KEY_FILE}.part"):
        (folder / name).unlink(missing_ok=True)
