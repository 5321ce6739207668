"""Data keys in memory, as a keyring has them."""

from __future__ import annotations

import secrets

from manylora_shared.encryption.sealing import KEY_BYTES, KEY_ID_BYTES, DataKey, Sealed


class MemoryKeys:
    def __init__(self) -> None:
        self.keys: dict[str, DataKey] = {}

    def sealing(self, owner: str) -> DataKey:
        if owner not in self.keys:
            self.keys[owner] = DataKey(owner, secrets.token_hex(KEY_ID_BYTES), secrets.token_bytes(KEY_BYTES))
        return self.keys[owner]

    def opening(self, owner: str, key_id: str) -> DataKey:
        key = self.keys.get(owner)
        if key is None or key.key_id != key_id:
            raise Sealed(f"the data key of {owner} is destroyed")
        return key

    def destroy(self, owner: str) -> None:
        del self.keys[owner]
