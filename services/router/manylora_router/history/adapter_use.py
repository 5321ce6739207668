"""How often an adapter's weights were where they are needed when a request came to its worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manylora_router.history.shelf import Shelf

MAX_ADAPTERS = 8_192
MAX_ADAPTERS_OF_TENANT = 256


@dataclass(eq=False, slots=True)
class AdapterUse:
    """Of one version, by its reference NAME@VERSION."""

    tenant: str
    reference: str
    on_device: int = 0
    on_host: int = 0
    in_store: int = 0  # on neither
    waited_ms: float = 0.0  # by the requests that did not find it on the device
    used_at: float = 0.0

    @property
    def requests(self) -> int:
        return self.on_device + self.on_host + self.in_store


class AdapterUses:
    def __init__(self) -> None:
        self._uses: Shelf[AdapterUse] = Shelf(most=MAX_ADAPTERS, most_of_tenant=MAX_ADAPTERS_OF_TENANT)

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, tenant: str, reference: str, *, found: str, waited_ms: float, now: float) -> None:
        """found: device, host, or anything else for neither."""
        use = self._uses.get(tenant, reference) or AdapterUse(tenant, reference)
        self._uses.put(tenant, reference, use)
        use.used_at = now
        match found:
            case "device":
                use.on_device += 1
                return
            case "host":
                use.on_host += 1
            case _:
                use.in_store += 1
        use.waited_ms += waited_ms

    def get(self, tenant: str, reference: str) -> AdapterUse | None:
        return self._uses.get(tenant, reference)

    def latest(self, tenant: str) -> Iterator[AdapterUse]:
        """First; empty: of all tenants."""
        return self._uses.newest(tenant)
