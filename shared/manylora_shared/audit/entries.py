"""What the audit log says, and how a chain of it is written and signed. Pure.

An entry is a line of canonical JSON. It has its number, the hash of the line before it, and a signature over all that.
A head says which entry is the last of a chain, and stands in etcd.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from manylora_shared.coordination.records import AuditHeadRecord

GENESIS = "0" * 64  # before the first
MAX_TEXT_CHARS = 300
BEGAN = "began"  # a chain's first entry; `detail` is its public key
MENDED = "mended"
COUNTED = "counted"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Texts that callers choose are cut."""

    at_unix_s: float
    action: str  # an RPC, a route, or what the log itself tells
    outcome: str  # intent (before it takes effect), done, failed, denied, told
    service: str = ""  # that wrote it
    who: str = ""  # the key's id; of a token `token:` and its subject
    may: str = ""  # the key's role, or its scopes
    tenant: str = ""  # the key's; empty: none
    peer: str = ""
    request: str = ""
    target: str = ""
    before: str = ""  # the sha256 of what stood there; empty: nothing did
    after: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Line:
    chain: str
    seq: int
    prev: str
    entry: Entry
    signature: str


_FIELDS = frozenset({"chain", "seq", "prev", *(each.name for each in dataclasses.fields(Entry))})


class NotALine(ValueError):
    pass


class Signer:
    def __init__(self, seed: bytes) -> None:
        """Raises ValueError where it has not 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw().hex()

    def line(
        self, chain: str, seq: int, prev: str, entry: Entry, sealed: Callable[[Entry], Entry] = lambda entry: entry
    ) -> bytes:
        """With its end. `sealed` gets what has been cut."""
        body = {"chain": chain, "seq": seq, "prev": prev, **dataclasses.asdict(sealed(_cut(entry)))}
        signature = self._key.sign(_canonical(body)).hex()
        return _canonical({**body, "sig": signature}) + b"\n"

    def head(self, chain: str, seq: int, last_hash: str, service: str, at_unix_s: float) -> AuditHeadRecord:
        told = AuditHeadRecord(chain, seq, last_hash, service, at_unix_s, self.public_key, "")
        return dataclasses.replace(told, signature=self._key.sign(_head_bytes(told)).hex())


def digest(data: bytes | None) -> str:
    return hashlib.sha256(data).hexdigest() if data is not None else ""


def hash_of(line: bytes) -> str:
    """Of a line with its end."""
    return hashlib.sha256(line).hexdigest()


def parse(line: bytes) -> Line:
    """Of a line without its end. Raises NotALine."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise NotALine("it is no JSON") from None
    if not isinstance(found, dict) or found.keys() != _FIELDS | {"sig"}:
        raise NotALine("it has not the fields of an entry")
    seq, at = found["seq"], found["at_unix_s"]
    texts = (value for name, value in found.items() if name not in ("seq", "at_unix_s"))
    if type(seq) is not int or type(at) not in (int, float) or not all(isinstance(each, str) for each in texts):
        raise NotALine("a field of it is of another kind")
    if _canonical(found) != line:
        raise NotALine("it is not written as the log writes")
    named = {name: found[name] for name in _FIELDS - {"chain", "seq", "prev"}}
    return Line(found["chain"], seq, found["prev"], Entry(**named), found["sig"])


def is_signed(line: Line, public_key: str) -> bool:
    body = {"chain": line.chain, "seq": line.seq, "prev": line.prev, **dataclasses.asdict(line.entry)}
    return _is_by(public_key, line.signature, _canonical(body))


def is_head_signed(head: AuditHeadRecord) -> bool:
    return _is_by(head.public_key, head.signature, _head_bytes(head))


def _is_by(public_key: str, signature: str, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _head_bytes(head: AuditHeadRecord) -> bytes:
    return _canonical({**dataclasses.asdict(head), "signature": ""})


def _cut(entry: Entry) -> Entry:
    told = dataclasses.asdict(entry)
    texts = {name: value[:MAX_TEXT_CHARS] for name, value in told.items() if isinstance(value, str)}
    cut: dict[str, Any] = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
    return dataclasses.replace(entry, **cut)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
