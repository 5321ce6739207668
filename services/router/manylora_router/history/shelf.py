"""What is remembered of tenants' things, each under its key: so many of one tenant, so many in all, the oldest go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class Shelf(Generic[V]):
    """A tenant that has all that it may have takes the place of its own oldest, and so pushes nobody else's out."""

    def __init__(self, *, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._all: OrderedDict[tuple[str, str], V] = OrderedDict()  # oldest first, as are each tenant's
        self._of: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, tenant: str, key: str) -> V | None:
        return self._all.get((tenant, key))

    def put(self, tenant: str, key: str, value: V) -> None:
        """As the newest."""
        self._drop(tenant, key)
        own = self._of.get(tenant, ())
        if len(own) >= self._most_of_tenant:
            self._drop(tenant, next(iter(own)))
        elif len(self._all) >= self._most:
            self._drop(*next(iter(self._all)))
        self._all[tenant, key] = value
        self._of.setdefault(tenant, OrderedDict())[key] = None

    def newest(self, tenant: str) -> Iterator[V]:
        """First; of one tenant, or, where it is empty, of all."""
        if not tenant:
            yield from reversed(self._all.values())
            return
        for key in reversed(self._of.get(tenant, {})):
            yield self._all[tenant, key]

    def find(self, key: str) -> V | None:
        """Whose it is does not count: O(tenants)."""
        return next((self._all[tenant, key] for tenant, own in self._of.items() if key in own), None)

    def _drop(self, tenant: str, key: str) -> None:
        if self._all.pop((tenant, key), None) is None:
            return
        own = self._of[tenant]
        del own[key]
        if not own:
            del self._of[tenant]
