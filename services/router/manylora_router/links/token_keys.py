"""The public keys of issuers of tokens, by file or URL: read at the start, now and then, and where one is missing."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import jwt
import yaml

from manylora_router.guard.tokens import Issuer, KeyState, read_issuers

_LOG = logging.getLogger(__name__)
REFRESH_S = 300.0
FILE_REFRESH_S = 2.0
FLOOR_S = 10.0  # between two fetches for keys that were missing
_TIMEOUT_S = 5.0
_MAX_BYTES = 256 * 1024


def load_issuers(path: Path) -> list[Issuer]:
    """Raises OSError, or ValueError where it is wrong."""
    try:
        return read_issuers(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as e:
        raise ValueError(f"{path}: {e}") from None


class _Set:
    def __init__(self) -> None:
        self.keys: dict[str | None, jwt.PyJWK] = {}
        self.read_at: float | None = None
        self.wanted = asyncio.Event()


class TokenKeys:
    """`run` it; `key_of` may be asked at any time."""

    def __init__(self, issuers: Sequence[Issuer]) -> None:
        self._sets = {each.issuer: _Set() for each in issuers}
        self._issuers = list(issuers)

    def key_of(self, issuer: Issuer, kid: str | None) -> jwt.PyJWK | KeyState:
        """Without a kid: the issuer's only key."""
        found = self._sets[issuer.issuer]
        if kid is None and len(found.keys) == 1:
            return next(iter(found.keys.values()))
        if kid is not None and (key := found.keys.get(kid)) is not None:
            return key
        now = asyncio.get_running_loop().time()
        if found.read_at is not None and now - found.read_at < FLOOR_S:
            return "unknown"
        found.wanted.set()
        return "asked"

    async def run(self) -> None:
        """Ends by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            for issuer in self._issuers:
                tasks.create_task(self._keep(issuer, self._sets[issuer.issuer]))

    async def _keep(self, issuer: Issuer, found: _Set) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                found.keys = await asyncio.to_thread(_read, issuer)
            except (OSError, ValueError, jwt.PyJWTError) as e:
                _LOG.warning(
                    "the keys of %s are not read from %s, the last ones stay: %s", issuer.issuer, issuer.jwks, e
                )
            found.read_at = loop.time()
            found.wanted.clear()  # who asked meanwhile was answered by this
            try:
                async with asyncio.timeout(REFRESH_S if issuer.is_url else FILE_REFRESH_S):
                    await found.wanted.wait()
            except TimeoutError:
                continue


def _read(issuer: Issuer) -> dict[str | None, jwt.PyJWK]:
    """By kid. Raises OSError, ValueError or PyJWTError."""
    if issuer.is_url:
        with urllib.request.urlopen(issuer.jwks, timeout=_TIMEOUT_S) as answer:  # https, or loopback: Issuer checks it
            data = answer.read(_MAX_BYTES + 1)
    else:
        data = Path(issuer.jwks).read_bytes()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return {key.key_id: key for key in jwt.PyJWKSet.from_dict(document).keys if key.public_key_use in (None, "sig")}
