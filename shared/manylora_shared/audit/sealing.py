"""How what an entry of the audit log tells is sealed: its target, its detail and where it came from, under the key of
the tenant that acted, or the cluster's. Chain, hashes and signatures are of what is written, so none of this is needed
to verify a log.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

from manylora_shared.audit.entries import Entry, NotALine, parse
from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.names import NameSeal
from manylora_shared.errors import NotFound, ServiceUnavailable

_LOG = logging.getLogger(__name__)
SEALED = ("peer", "target", "detail")


class EntrySeal:
    """Blocks: for threads."""

    def __init__(self, names: NameSeal) -> None:
        self._names = names

    def sealed(self, entry: Entry) -> Entry:
        """What the log tells of itself has no caller, and stays as it is: whoever verifies it reads that.

        Raises ServiceUnavailable.
        """
        if not self._names.is_on or not entry.who:
            return entry
        try:
            return self._under(entry.tenant or CLUSTER, entry)
        except (NotFound, ServiceUnavailable):  # a tenant's key service may be away; the cluster's key is at hand
            return self._under(CLUSTER, entry)

    def opened(self, line: bytes) -> bytes:
        """A line as it is shown. Its signature is not of that."""
        try:
            entry = parse(line.rstrip(b"\n")).entry
        except NotALine:
            return line
        texts = {name: getattr(entry, name) for name in SEALED}
        try:
            texts = {name: self._names.open(entry.tenant, name, text) for name, text in texts.items()}
        except ServiceUnavailable as e:
            _LOG.warning("an entry of the audit log cannot be opened now: %s", e.message)
        return json.dumps({**json.loads(line), **texts}, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    def _under(self, owner: str, entry: Entry) -> Entry:
        texts: dict[str, Any] = {name: self._names.seal(owner, name, getattr(entry, name)) for name in SEALED}
        return dataclasses.replace(entry, **texts)


PLAIN = EntrySeal(NameSeal(None))
