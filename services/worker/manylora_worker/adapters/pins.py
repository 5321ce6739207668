"""What tenants' policies pin, and which pins the worker can keep. AdapterCache writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from manylora_shared.ids import AdapterName, AdapterUid, TenantId
from manylora_shared.tenancy.adapter_shares import honoured_pins

NO_ROOM_TO_PIN = "what is pinned exceeds what the worker can keep beside its largest adapter"


class Pin(NamedTuple):
    """One name of a policy's `adapters.pin`."""

    name: AdapterName
    uid: AdapterUid | None  # what the name stands for now; None: nothing
    size_bytes: int = 0  # as registered


class PinState(NamedTuple):
    pin: Pin
    is_ready: bool  # on the device
    problem: str = ""  # why it is not kept there; empty: it is, or is on its way


class PinBook:
    """capacity_bytes: of the device tier."""

    def __init__(self, capacity_bytes: int, weight_of: Callable[[TenantId], int]) -> None:
        self.is_due = False  # something has changed since `resolve`
        self.version = 0  # grows with each `resolve`
        self._capacity_bytes = capacity_bytes
        self._weight_of = weight_of
        self._pins: Mapping[TenantId, Sequence[Pin]] = {}
        self._largest_bytes = 0
        self._problems: dict[tuple[TenantId, AdapterUid], str] = {}
        # loads that failed and are tried again: told until it is known how that went
        self._failed_before: dict[tuple[TenantId, AdapterUid], str] = {}

    @property
    def tenants(self) -> Sequence[TenantId]:
        return list(self._pins)

    def set(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        """See AdapterCache.set_pins."""
        self._pins, self._largest_bytes = pins, largest_bytes
        failed = {key: problem for key, problem in self._problems.items() if problem != NO_ROOM_TO_PIN}
        self._failed_before = {
            (tenant, uid): problem
            for (tenant, uid), problem in (self._failed_before | failed).items()
            if any(pin.uid == uid for pin in pins.get(tenant, ()))
        }
        self._problems.clear()
        self.is_due = True

    def changed(self) -> None:
        """Sizes or weights have."""
        self.is_due |= bool(self._pins)

    def uids_of(self, tenant_id: TenantId) -> list[AdapterUid]:
        """Each once, whatever number of names it has."""
        return list(dict.fromkeys(pin.uid for pin in self._pins.get(tenant_id, ()) if pin.uid is not None))

    def resolve(self, size_of: Callable[[AdapterUid], int]) -> dict[tuple[TenantId, AdapterUid], None]:
        """What has room, without what failed to load."""
        self.is_due = False
        self.version += 1
        sizes: dict[AdapterUid, int] = {}
        for pin in (pin for pins in self._pins.values() for pin in pins):
            if pin.uid is not None:
                sizes[pin.uid] = max(pin.size_bytes, size_of(pin.uid))
        uids = {tenant: self.uids_of(tenant) for tenant in self._pins}
        honoured = honoured_pins(
            {tenant: [sizes[uid] for uid in mine] for tenant, mine in uids.items()},
            {tenant: self._weight_of(tenant) for tenant in uids},
            self._capacity_bytes,
            self._largest_bytes,
        )
        wanted: dict[tuple[TenantId, AdapterUid], None] = {}
        for tenant, mine in uids.items():
            for uid, is_honoured in zip(mine, honoured[tenant], strict=True):
                if not is_honoured:
                    self._problems[tenant, uid] = NO_ROOM_TO_PIN
                    continue
                if self._problems.get((tenant, uid)) == NO_ROOM_TO_PIN:
                    del self._problems[tenant, uid]
                if (tenant, uid) not in self._problems:
                    wanted[tenant, uid] = None
        return wanted

    def failed(self, tenant_id: TenantId, uid: AdapterUid, message: str) -> None:
        """Until `set`, or until a request has brought it."""
        self._problems[tenant_id, uid] = message

    def arrived(self, uid: AdapterUid) -> None:
        for tenant in self._pins:
            self._failed_before.pop((tenant, uid), None)
            if self._problems.get((tenant, uid), NO_ROOM_TO_PIN) != NO_ROOM_TO_PIN:
                del self._problems[tenant, uid]
                self.is_due = True

    def states(self, tenant_id: TenantId, is_ready: Callable[[AdapterUid], bool]) -> tuple[PinState, ...]:
        """In the policy's order."""
        return tuple(self._state(tenant_id, pin, is_ready) for pin in self._pins.get(tenant_id, ()))

    def _state(self, tenant_id: TenantId, pin: Pin, is_ready: Callable[[AdapterUid], bool]) -> PinState:
        if pin.uid is None:
            return PinState(pin, is_ready=False, problem="no adapter has this name")
        if is_ready(pin.uid):
            return PinState(pin, is_ready=True)
        key = (tenant_id, pin.uid)
        return PinState(pin, is_ready=False, problem=self._problems.get(key) or self._failed_before.get(key, ""))
