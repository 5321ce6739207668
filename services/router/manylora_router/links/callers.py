"""Who calls: the one place that every front asks of a key or a token. Owns the count of failures by host, and what the
router lends itself for requests of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manylora_shared.coordination.peers import PeerSecret
from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import ManyloraError, Unauthenticated
from manylora_shared.ids import TenantId
from manylora_shared.metadata import CALLER_KEY
from manylora_shared.process.clock import WallClock
from manylora_shared.tenancy.identity import (
    AUTHORIZATION_KEY,
    Principal,
    authenticate,
    bearer,
    bearer_of,
    host_of,
)
from manylora_shared.tenancy.roles import Scope
from manylora_shared.transport.base import ServerCall

from manylora_router.guard.failures import Failures
from manylora_router.guard.tokens import Tokens, is_token

_LENT_BITS = 256


@dataclass(frozen=True)
class Found:
    principal: Principal
    revision: int | None  # of all keys; None: it is a token's
    expires_unix_s: float = 0.0  # 0: never


Seen = Found | ManyloraError | None  # a refusal; None: a token's that was not looked at lately


class Callers:
    """
    tokens: None: none are taken.
    on_stranger: told the host of each call without a valid key.
    keys_revision: another one behind each change of a key.
    secret: who shows it says for whom it asks; None: nobody does.
    """

    def __init__(
        self,
        key_of: Callable[[str], KeyRecord | None],
        clock: WallClock,
        tokens: Tokens | None = None,
        on_stranger: Callable[[str], None] = lambda host: None,
        secret: PeerSecret | None = None,
        *,
        keys_revision: Callable[[], int] = lambda: 0,
    ) -> None:
        self._key_of = key_of
        self._clock = clock
        self._tokens = tokens
        self._on_stranger = on_stranger
        self._secret = secret
        self._keys_revision = keys_revision
        self._failures = Failures()
        self._lent: dict[str, Principal] = {}

    @contextmanager
    def lend(self, tenant_id: TenantId, getrandbits: Callable[[int], int]) -> Iterator[str]:
        """An authorization to generate in the tenant's name, for requests of this process itself and for so long."""
        secret = f"{getrandbits(_LENT_BITS):064x}"
        self._lent[secret] = Principal("", tenant_id, (Scope.GENERATE,))
        try:
            yield bearer(secret)[AUTHORIZATION_KEY]
        finally:
            del self._lent[secret]

    def known(self, authorization: str, peer: str | None = None, seen: Seen = None) -> Principal:
        """
        Args:
            peer: as the front knows it; None: a call that was let in already.
            seen: what `seen` said of both, which is asked again only where keys have changed since.

        Raises:
            Unauthenticated, PermissionDenied, Overloaded, or ServiceUnavailable while a token's key is fetched.
        """
        now = self._clock.now_unix_s()
        given = bearer_of(authorization)
        if peer is None:
            if (lent := self._lent.get(given)) is not None:
                return lent
            return self._principal(given, now, None)
        host = host_of(peer)
        try:
            if isinstance(seen, Found):
                if self._stands(seen, now):
                    return seen.principal
            elif seen is not None:
                raise seen
            return self._principal(given, now, host)
        except Unauthenticated as e:
            self._on_stranger(host)
            self._failures.note(host, now, e)
            raise

    def seen(self, authorization: str, peer: str) -> Seen:
        """By what costs little; nothing is counted."""
        given, now = bearer_of(authorization), self._clock.now_unix_s()
        try:
            if self._tokens is not None and is_token(given):
                known = self._tokens.recall(given, now)
                return None if known is None else Found(known, None)
            looked_at: list[KeyRecord | None] = []

            def look(key_id: str) -> KeyRecord | None:
                looked_at.append(self._key_of(key_id))
                return looked_at[-1]

            principal = authenticate(given, look, now_unix_s=now, host=host_of(peer))
            expires = max((record.expires_unix_s for record in looked_at if record is not None), default=0.0)
            return Found(principal, self._keys_revision(), expires)
        except ManyloraError as refusal:
            return refusal

    def peer_of(self, call: ServerCall) -> str:
        """From where it came; of one that another router makes in its caller's name, that caller's host."""
        host = call.metadata.get(CALLER_KEY, "")
        return host if host and self._secret is not None and self._secret.is_shown(call) else call.peer

    def _stands(self, seen: Found, now: float) -> bool:
        if seen.revision is None:
            return True
        return seen.revision == self._keys_revision() and (not seen.expires_unix_s or now < seen.expires_unix_s)

    def _principal(self, given: str, now: float, host: str | None) -> Principal:
        if self._tokens is None or not is_token(given):
            return authenticate(given, self._key_of, now_unix_s=now, host=host)
        known = self._tokens.recall(given, now)
        if known is not None:
            return known
        if host is not None:  # a signature costs a hundred times what a hash does
            self._failures.check(host, now)
        return self._tokens.principal(given, now)
