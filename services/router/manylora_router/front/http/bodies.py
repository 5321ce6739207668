"""How many bytes of bodies are read and parsed at a time, over all and for one tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manylora_shared.errors import Overloaded

MAX_BYTES = 256 << 20
MAX_TENANT_BYTES = 64 << 20


class BodyRoom:
    def __init__(self) -> None:
        self._held: Counter[str] = Counter()  # by tenant

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Gives what takes so many bytes more. Raises Overloaded."""
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self._held[tenant] + count > MAX_TENANT_BYTES:
                raise Overloaded(
                    f"this tenant's requests under way here have more than {MAX_TENANT_BYTES} bytes", retry_after_s=1.0
                )
            if self.held_bytes + count > MAX_BYTES:
                raise Overloaded("too many requests are being read here", retry_after_s=1.0)
            self._held[tenant] += count
            held += count

        try:
            yield take
        finally:
            self._held[tenant] -= held
            if not self._held[tenant]:
                del self._held[tenant]
