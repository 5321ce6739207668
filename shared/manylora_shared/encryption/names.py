"""Short texts sealed each for itself, so that they can stand in a table or a line: names, ids, addresses.

The same text of one owner under one title is the same when it is sealed (AES-256-SIV), so rows can be grouped by it;
of two owners, or under two titles, it is not.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.sealing import KEY_ID_BYTES, DataKey, NoKeys, OpeningKeys, Sealed, SealingKeys
from manylora_shared.errors import NotFound

UNREADABLE = "(unreadable)"  # its key is destroyed, or this process has none
_MARKS: Mapping[bool, str] = {False: "~t", True: "~c"}  # under its tenant's key, under the cluster's
_MARK_CHARS = 2
_DOMAIN = b"manylora-names-1\0"
_SIV_KEY_BYTES = 64


class NameSeal:
    """For threads: keys may block. keys: None: nothing is sealed here, and what was stays so."""

    def __init__(self, keys: SealingKeys | None) -> None:
        self._sealing = keys
        self._opening: OpeningKeys = keys or NoKeys()
        self._ciphers: dict[str, tuple[str, AESSIV]] = {}  # by owner: its key's id

    @property
    def is_on(self) -> bool:
        return self._sealing is not None

    def seal(self, owner: str, title: str, text: str) -> str:
        """Raises NotFound: no such tenant; ServiceUnavailable."""
        if self._sealing is None or not text:
            return text
        try:
            key = self._sealing.sealing(owner)
        except (NotFound, Sealed):
            self._ciphers.pop(owner, None)
            raise
        sealed = bytes.fromhex(key.key_id) + self._cipher(key).encrypt(text.encode(), [title.encode()])
        return _MARKS[owner == CLUSTER] + base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def open(self, tenant: str, title: str, text: str) -> str:
        """Of a text that `seal` made, or left as it was. tenant: whose key it is where it is not the cluster's.

        Raises ServiceUnavailable.
        """
        mark = text[:_MARK_CHARS]
        if mark not in _MARKS.values():
            return text
        owner = CLUSTER if mark == _MARKS[True] else tenant
        try:
            sealed = base64.urlsafe_b64decode(text[_MARK_CHARS:] + "==")
            key = self._opening.opening(owner, sealed[:KEY_ID_BYTES].hex())
            return self._cipher(key).decrypt(sealed[KEY_ID_BYTES:], [title.encode()]).decode()
        except (Sealed, InvalidTag, ValueError):
            self._ciphers.pop(owner, None)
            return UNREADABLE

    def _cipher(self, key: DataKey) -> AESSIV:
        known = self._ciphers.get(key.owner)
        if known is None or known[0] != key.key_id:
            derived = HKDF(algorithm=SHA256(), length=_SIV_KEY_BYTES, salt=None, info=_DOMAIN).derive(key.secret)
            known = self._ciphers[key.owner] = key.key_id, AESSIV(derived)
        return known[1]
