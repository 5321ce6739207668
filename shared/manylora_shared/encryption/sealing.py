"""How a file is sealed: AES-256-GCM in chunks, under a key of its own made of its owner's data key. Pure.

A sealed file says whose it is and which data key opens it; its name is not in it, and whoever opens it must know it.
A changed, cut, reordered or renamed file, or one with another's chunk in it, is found at the chunk where it is so.
"""

# header  MAGIC | key id (16 bytes) | salt (32) | length of owner (1) | owner
# chunk   AES-256-GCM of up to CHUNK_BYTES, tag behind it; each but the last is full. At least one follows.
#
# key of the file: HKDF-SHA256(data key, salt, info = domain | header | name)
# nonce: number of the chunk (11 bytes, big-endian) | 1 for the last chunk, else 0

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manylora_shared.errors import DataLost, HttpError, Unready

MAGIC = b"\x93MLSEAL1"  # no JSON begins so, and no safetensors file has a header of that length
KEY_BYTES = 32
KEY_ID_BYTES = 16
SALT_BYTES = 32
CHUNK_BYTES = 1 << 20
TAG_BYTES = 16
_FIXED = struct.Struct(f">{len(MAGIC)}s{KEY_ID_BYTES}s{SALT_BYTES}sB")
MAX_HEADER_BYTES = _FIXED.size + 255
_DOMAIN = b"manylora-seal-1\0"


class SealBroken(DataLost):
    """What is there is not what was sealed under this name."""

    label = "seal_broken"


class Sealed(Unready):
    """It is sealed under a key that there is not, or not here."""

    label = "sealed"
    own_http = HttpError(500, "server_error")  # nothing that the caller sends would change it


@dataclass(frozen=True)
class DataKey:
    owner: str
    key_id: str  # hex
    secret: bytes = field(repr=False)


class OpeningKeys(Protocol):
    """From any thread; may block."""

    def opening(self, owner: str, key_id: str) -> DataKey:
        """Raises Sealed: there is no such key any more; ServiceUnavailable: it cannot be had now."""


class SealingKeys(OpeningKeys, Protocol):
    def sealing(self, owner: str) -> DataKey:
        """Made where there is none. Raises NotFound: no such tenant; ServiceUnavailable."""


class NoKeys:
    """Of a process that was told of no key service."""

    def opening(self, owner: str, key_id: str) -> DataKey:
        raise Sealed("the file is sealed, and this process has no --encryption to open it with")


class OneKey:
    def __init__(self, key: DataKey) -> None:
        self._key = key

    def opening(self, owner: str, key_id: str) -> DataKey:
        if (owner, key_id) != (self._key.owner, self._key.key_id):
            raise Sealed("the file is sealed under another key")
        return self._key


@dataclass(frozen=True)
class Header:
    owner: str
    key_id: str
    salt: bytes

    @property
    def encoded(self) -> bytes:
        owner = self.owner.encode()
        return _FIXED.pack(MAGIC, bytes.fromhex(self.key_id), self.salt, len(owner)) + owner

    @classmethod
    def of(cls, start: bytes) -> Self | None:
        """Of a file's first MAX_HEADER_BYTES, or all of a shorter one; None: it is not sealed."""
        if not start.startswith(MAGIC):
            return None
        if len(start) < _FIXED.size:
            raise SealBroken("the sealed file ends in its header")
        _, key_id, salt, owner_bytes = _FIXED.unpack_from(start)
        owner = start[_FIXED.size : _FIXED.size + owner_bytes]
        if len(owner) < owner_bytes or not owner.isascii():
            raise SealBroken("the sealed file's header is not one")
        return cls(owner.decode(), key_id.hex(), salt)

    def plain_bytes(self, sealed_bytes: int) -> int:
        """Of a whole file of so many. Raises SealBroken: none has so many."""
        body = sealed_bytes - len(self.encoded)
        full, rest = divmod(body, CHUNK_BYTES + TAG_BYTES)
        if body < TAG_BYTES or 0 < rest < TAG_BYTES or (rest == TAG_BYTES and full):
            raise SealBroken("the sealed file has a length that none has")
        return full * CHUNK_BYTES + max(0, rest - TAG_BYTES)


def most_sealed_bytes(plain_bytes: int) -> int:
    return MAX_HEADER_BYTES + plain_bytes + TAG_BYTES * (plain_bytes // CHUNK_BYTES + 1)


class _Cipher:
    def __init__(self, header: Header, name: str, key: DataKey) -> None:
        info = _DOMAIN + header.encoded + name.encode()
        derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=header.salt, info=info).derive(key.secret)
        self._aead = AESGCM(derived)
        self._name = name

    def seal(self, number: int, data: bytes | bytearray | memoryview, *, is_last: bool) -> bytes:
        return self._aead.encrypt(_nonce(number, is_last), data, None)

    def open(self, number: int, data: bytes | memoryview, *, is_last: bool) -> bytes:
        try:
            return self._aead.decrypt(_nonce(number, is_last), data, None)
        except InvalidTag:
            raise self._broken(number) from None

    def open_into(self, number: int, data: memoryview, target: memoryview, *, is_last: bool) -> None:
        try:
            self._aead.decrypt_into(_nonce(number, is_last), data, None, target)
        except InvalidTag:
            raise self._broken(number) from None

    def _broken(self, number: int) -> SealBroken:
        return SealBroken(f"{self._name} is not what was sealed under this name, from byte {number * CHUNK_BYTES} on")


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


class Sealer:
    """Seals what is added to it. salt: SALT_BYTES of chance, which no other file has."""

    def __init__(self, write: Callable[[bytes], object], name: str, key: DataKey, salt: bytes) -> None:
        header = Header(key.owner, key.key_id, salt)
        self._cipher = _Cipher(header, name, key)
        self._write = write
        self._rest = bytearray()
        self._number = 0
        self.plain_bytes = 0
        write(header.encoded)

    def add(self, data: bytes) -> None:
        self.plain_bytes += len(data)
        self._rest += data
        while len(self._rest) > CHUNK_BYTES:  # what fills one exactly may be the last
            self._put(self._rest[:CHUNK_BYTES], is_last=False)
            del self._rest[:CHUNK_BYTES]

    def end(self) -> None:
        self._put(self._rest, is_last=True)
        self._rest.clear()

    def _put(self, chunk: bytearray, *, is_last: bool) -> None:
        self._write(self._cipher.seal(self._number, chunk, is_last=is_last))
        self._number += 1


def seal(data: bytes, name: str, key: DataKey, salt: bytes) -> bytes:
    parts: list[bytes] = []
    sealer = Sealer(parts.append, name, key, salt)
    sealer.add(data)
    sealer.end()
    return b"".join(parts)


def opened(parts: Iterable[bytes], name: str, keys: OpeningKeys) -> Iterator[bytes]:
    """A file's content; of one that is not sealed, its parts. Raises SealBroken, Sealed, ServiceUnavailable."""
    source = iter(parts)
    rest = bytearray()
    _fill(rest, source, MAX_HEADER_BYTES)
    header = Header.of(bytes(rest[:MAX_HEADER_BYTES]))
    if header is None:
        yield bytes(rest)
        yield from source
        return
    cipher = _Cipher(header, name, keys.opening(header.owner, header.key_id))
    del rest[: len(header.encoded)]
    number, is_last = 0, False
    while not is_last:
        is_last = not _fill(rest, source, CHUNK_BYTES + TAG_BYTES + 1)
        yield cipher.open(number, bytes(rest[: CHUNK_BYTES + TAG_BYTES]), is_last=is_last)
        del rest[: CHUNK_BYTES + TAG_BYTES]
        number += 1


def open_bytes(data: bytes, name: str, keys: OpeningKeys) -> bytes:
    """As `opened`."""
    return b"".join(opened([data], name, keys))


def _fill(buffer: bytearray, source: Iterator[bytes], wanted: int) -> bool:
    """Whether there is so much."""
    while len(buffer) < wanted:
        part = next(source, None)
        if part is None:
            return False
        buffer += part
    return True


class SealedFile(io.RawIOBase):
    """A sealed file's content, by its chunks; whole ones are opened in the reader's memory. Closes `file`."""

    def __init__(self, file: io.BufferedIOBase | io.RawIOBase, name: str, keys: OpeningKeys) -> None:
        """Raises SealBroken, Sealed, ServiceUnavailable."""
        start = file.read(MAX_HEADER_BYTES) or b""
        header = Header.of(start)
        assert header is not None, "whoever opens it has looked"
        self._first = len(header.encoded)
        self.plain_bytes = header.plain_bytes(file.seek(0, io.SEEK_END))
        self._cipher = _Cipher(header, name, keys.opening(header.owner, header.key_id))
        self._file = file
        self._last = max(0, self.plain_bytes - 1) // CHUNK_BYTES
        self._at = 0
        self._sealed = bytearray(CHUNK_BYTES + TAG_BYTES)
        self._chunk = (-1, b"")  # the last one that was opened in part
        if not self.plain_bytes:
            self._opened(0)  # or an empty file would be read without a look at its tag

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.plain_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        number, offset = divmod(self._at, CHUNK_BYTES)
        size = min(CHUNK_BYTES, self.plain_bytes - number * CHUNK_BYTES)
        if offset >= size or not len(target):
            return 0
        if offset == 0 and len(target) >= size:
            sealed = self._read(number, size)
            self._cipher.open_into(number, sealed, target[:size], is_last=number == self._last)
            taken = size
        else:
            chunk = self._opened(number)
            taken = min(len(target), size - offset)
            target[:taken] = chunk[offset : offset + taken]
        self._at += taken
        return taken

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _opened(self, number: int) -> bytes:
        if self._chunk[0] != number:
            sealed = self._read(number, min(CHUNK_BYTES, self.plain_bytes - number * CHUNK_BYTES))
            self._chunk = number, self._cipher.open(number, sealed, is_last=number == self._last)
        return self._chunk[1]

    def _read(self, number: int, size: int) -> memoryview:
        sealed = memoryview(self._sealed)[: size + TAG_BYTES]
        self._file.seek(self._first + number * (CHUNK_BYTES + TAG_BYTES))
        filled = 0
        while filled < len(sealed):
            count = self._file.readinto(sealed[filled:])
            if not count:
                raise SealBroken("the sealed file was cut while it was read")
            filled += count
        return sealed
