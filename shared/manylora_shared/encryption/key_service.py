"""The seam to whoever keeps the key that wraps data keys (KEK), and the default: a file of such keys. Blocks; safe from
any thread.
"""

# The file is JSON, {"keys": [{"id", "key"}, ...]}: the first one wraps, all of them open. A rotation puts a new one
# before the others; `forget_others` leaves it alone there.

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from manylora_shared.encryption.sealing import KEY_BYTES, Sealed
from manylora_shared.errors import ServiceUnavailable

RETRY_S = 1.0
_NONCE_BYTES = 12
_MAX_FILE_BYTES = 1 << 20


class KeyServiceUnavailable(ServiceUnavailable):
    label = "key_service_unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=RETRY_S)


@dataclass(frozen=True)
class Wrapped:
    by: str  # which key wrapped it, for people and for rotation
    data: bytes


class KeyService(Protocol):
    """Every method raises KeyServiceUnavailable where it does not answer or refuses this process."""

    def wrap(self, secret: bytes, owner: str) -> Wrapped: ...

    def unwrap(self, wrapped: Wrapped, owner: str) -> bytes:
        """Raises Sealed: it does not open, for this owner or at all."""

    def current(self) -> str:
        """What `wrap` would say in `by`."""

    def rotate(self) -> None:
        """From now on another key wraps; what was wrapped before still opens."""

    def forget_others(self) -> bool:
        """Only the current key is left; nothing that others wrapped opens. Whether this service can."""


def context_of(owner: str) -> Mapping[str, str]:
    """What a wrapped key is bound to: put into another owner's record, it does not open."""
    return {"manylora-owner": owner}


def _bound(owner: str) -> bytes:
    return json.dumps(context_of(owner), sort_keys=True).encode()


class LocalKeys:
    """A file that routers and workers share. Made where there is none."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, OSError."""
        self._path = path
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _put_first(path, [_new_key()])
        self._keys = _read(path)

    def wrap(self, secret: bytes, owner: str) -> Wrapped:
        self._refresh()
        by, key = next(iter(self._keys.items()))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return Wrapped(by, nonce + AESGCM(key).encrypt(nonce, secret, _bound(owner)))

    def unwrap(self, wrapped: Wrapped, owner: str) -> bytes:
        if wrapped.by not in self._keys:
            self._refresh()
        key = self._keys.get(wrapped.by)
        if key is None:
            raise Sealed(f"a data key is wrapped by {wrapped.by}, which is not in {self._path.name} (any more)")
        try:
            return AESGCM(key).decrypt(wrapped.data[:_NONCE_BYTES], wrapped.data[_NONCE_BYTES:], _bound(owner))
        except (InvalidTag, ValueError):
            raise Sealed(f"the data key of {owner} is not what {wrapped.by} wrapped") from None

    def current(self) -> str:
        self._refresh()
        return next(iter(self._keys))

    def rotate(self) -> None:
        with self._alone():
            _write(self._path, [_new_key(), *_read(self._path).items()])
        self._refresh()

    def forget_others(self) -> bool:
        with self._alone():
            _write(self._path, list(_read(self._path).items())[:1])
        self._refresh()
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Of all processes that use the file. Raises KeyServiceUnavailable."""
        try:
            descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise KeyServiceUnavailable(f"the file of key-encryption keys cannot be changed: {error}") from error

    def _refresh(self) -> None:
        try:
            self._keys = _read(self._path)
        except (OSError, ValueError) as error:
            raise KeyServiceUnavailable(f"the file of key-encryption keys cannot be read: {error}") from error


def _new_key() -> tuple[str, bytes]:
    return f"local-{secrets.token_hex(4)}", secrets.token_bytes(KEY_BYTES)


def _read(path: Path) -> dict[str, bytes]:
    """Raises OSError, ValueError."""
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES)
    try:
        loaded: Any = json.loads(data)
        found = {str(each["id"]): base64.b64decode(each["key"], validate=True) for each in loaded["keys"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: is no file of key-encryption keys") from None  # nothing of it may be shown
    if not found or any(len(key) != KEY_BYTES for key in found.values()):
        raise ValueError(f"{path}: must have a key, and each must have {KEY_BYTES} bytes")
    return found


def _encoded(keys: list[tuple[str, bytes]]) -> bytes:
    written = [{"id": name, "key": base64.b64encode(key).decode()} for name, key in keys]
    return json.dumps({"keys": written}, indent=1).encode() + b"\n"


def _write(path: Path, keys: list[tuple[str, bytes]]) -> None:
    unfinished = _beside(path, keys)
    try:
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _put_first(path: Path, keys: list[tuple[str, bytes]]) -> None:
    """Unless another process was faster."""
    unfinished = _beside(path, keys)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        pass
    finally:
        unfinished.unlink()
    _sync(path.parent)


def _beside(path: Path, keys: list[tuple[str, bytes]]) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # readable by its owner alone
    with open(descriptor, "wb") as file:
        file.write(_encoded(keys))
        file.flush()
        os.fsync(file.fileno())
    return Path(name)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
