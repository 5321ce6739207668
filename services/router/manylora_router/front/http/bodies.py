"""How many bytes of bodies are read and parsed at a time, over all and for one tenant; and how many values a body has,
which its bytes tell before it is parsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manylora_shared.errors import InvalidRequest, Overloaded

MAX_BYTES = 256 << 20
MAX_TENANT_BYTES = 64 << 20
# The parser holds the interpreter, and with it all streams, for as long as values take. Those in texts count too: that
# is quicker than to look for them.
_MAX_MARKS = {
    "values": ((b",",), 262_144),
    "lists and objects": ((b"[", b"{"), 65_536),
    "names": ((b":",), 65_536),
}
_MARK_BYTES = 64  # that many bytes of plain text are parsed in the time of a value


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


def cost_of(data: bytes) -> int:
    """In bytes of plain text that take as long to parse. Raises InvalidRequest."""
    marks = 0
    for name, (bytes_of, most) in _MAX_MARKS.items():
        found = sum(data.count(each) for each in bytes_of)
        if found > most:
            raise InvalidRequest.of("body", f"has some {found} {name}, those in its texts included: more than {most}")
        marks += found
    return len(data) + _MARK_BYTES * marks
