"""Who calls: the one place that every front asks of a key or a token. Owns the count of failures by host."""

from __future__ import annotations

from collections.abc import Callable

from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import Unauthenticated
from manylora_shared.process.clock import WallClock
from manylora_shared.tenancy.identity import Principal, authenticate, bearer_of, host_of

from manylora_router.guard.failures import Failures
from manylora_router.guard.tokens import Tokens, is_token


class Callers:
    """tokens: None: none are taken."""

    def __init__(
        self, key_of: Callable[[str], KeyRecord | None], clock: WallClock, tokens: Tokens | None = None
    ) -> None:
        self._key_of = key_of
        self._clock = clock
        self._tokens = tokens
        self._failures = Failures()

    def known(self, authorization: str, peer: str | None = None) -> Principal:
        """
        Args:
            peer: as the front knows it; None: a call that was let in already.

        Raises:
            Unauthenticated, PermissionDenied, Overloaded, or ServiceUnavailable while a token's key is fetched.
        """
        now = self._clock.now_unix_s()
        given = bearer_of(authorization)
        if peer is None:
            return self._principal(given, now, None)
        host = host_of(peer)
        try:
            return self._principal(given, now, host)
        except Unauthenticated as e:
            self._failures.note(host, now, e)
            raise

    def _principal(self, given: str, now: float, host: str | None) -> Principal:
        if self._tokens is None or not is_token(given):
            return authenticate(given, self._key_of, now_unix_s=now, host=host)
        known = self._tokens.recall(given, now)
        if known is not None:
            return known
        if host is not None:  # a signature costs a hundred times what a hash does
            self._failures.check(host, now)
        return self._tokens.principal(given, now)
