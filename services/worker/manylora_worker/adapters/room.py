"""Who makes room for whom on a tier of the adapter cache (decision 20), in this order:

1. what nobody claims;
2. the tenant's own above its share, by idle time x bytes;
3. others' above their shares; for a tenant that would be above itself, only of those further above by weight;
4. unless for a prefetch: its own, then what nobody has used for long;
5. after `patience_s`, for a tenant with nothing else beside its pins: whatever nobody uses now.

A tenant *claims* what it has used since it came to the tier. What is in use, pinned or being loaded stays; what others
wait for goes only for one further ahead in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_shared.tenancy.adapter_shares import max_min

from manylora_worker.kinds.api import AdapterTier


@dataclass(eq=False)
class Entry:
    """An adapter that is off the disk, or wanted there."""

    uid: AdapterUid
    size_bytes: int = 0  # on either tier, as its first host load told; 0: not known yet
    on_host: bool = False
    on_device: bool = False
    loading: AdapterTier | None = None
    users: dict[RequestId, None] = field(default_factory=dict)
    waiters: dict[RequestId, TenantId] = field(default_factory=dict)
    pinned_by: dict[TenantId, None] = field(default_factory=dict)
    # by tenant that waits for it: its number in the order of coming
    queued: dict[TenantId, int] = field(default_factory=dict)
    claims: dict[AdapterTier, dict[TenantId, float]] = field(  # by tier: who used it, and when last
        default_factory=lambda: {AdapterTier.HOST: {}, AdapterTier.DEVICE: {}}
    )
    no_room_since: dict[TenantId, float] = field(default_factory=dict)  # by tenant that waits for it
    is_prefetched: bool = False  # to be loaded without anybody who waits for it
    is_guess: bool = False  # nor anybody who asked for that
    guessed_at: float = 0.0
    is_near: bool | None = None  # on this machine's disk; None: to be asked
    fetched_for: TenantId | None = None  # in whose place, while it is being fetched
    num_refetches: int = 0  # since it was read last: it left the disk meanwhile
    last_tick: int = 0

    @property
    def is_unused(self) -> bool:
        """On disk alone, and nobody wants it elsewhere."""
        return not (self.on_device or self.on_host or self.loading or self.queued or self.is_prefetched)

    @property
    def in_use(self) -> bool:
        return bool(self.users or self.pinned_by)

    def is_on(self, tier: AdapterTier) -> bool:
        return self.on_device if tier is AdapterTier.DEVICE else self.on_host

    def uses(self, tier: AdapterTier) -> bool:
        return self.is_on(tier) or self.loading is tier


@dataclass(frozen=True)
class Eviction:
    uid: AdapterUid
    tier: AdapterTier
    winner: TenantId | None  # for whom
    # who claimed it: bytes that the tenant had before, its share, and seconds since it used the adapter
    losers: Mapping[TenantId, tuple[int, int, float]]
    waited_s: float  # for how long the winner has found no room, where it has nothing else; else 0
    has_copy: bool  # it left the device, and is on the host still


class Plan(NamedTuple):
    evictions: Sequence[Eviction] = ()
    releases: Sequence[AdapterUid] = ()  # the tenant gives up its claims, and others keep the adapters


@dataclass(frozen=True)
class Standing:
    """Bytes that each tenant claims, and its share."""

    held: Mapping[TenantId, int]
    shares: Mapping[TenantId, int]

    def is_within(self, tenant_id: TenantId, more_bytes: int = 0) -> bool:
        return self.held.get(tenant_id, 0) + more_bytes <= self.shares.get(tenant_id, 0)


class TierRoom:
    def __init__(
        self,
        tier: AdapterTier,
        budget_bytes: int,
        weight_of: Callable[[TenantId], int],
        *,
        borrow_after_s: float,
        borrow_copy_after_s: float,
        patience_s: float,
    ) -> None:
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.entries: dict[AdapterUid, Entry] = {}  # on the tier or being loaded to it, as Residency says
        self._weight_of = weight_of
        self._borrow_after_s = borrow_after_s
        self._borrow_copy_after_s = borrow_copy_after_s
        self.patience_s = patience_s

    @property
    def used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    def held(self) -> dict[TenantId, int]:
        """In bytes."""
        held: dict[TenantId, int] = {}
        for entry in self.entries.values():
            for tenant_id in entry.claims[self.tier]:
                held[tenant_id] = held.get(tenant_id, 0) + entry.size_bytes
        return held

    def standing(self, waiting: Mapping[TenantId, int], floors: Mapping[TenantId, int]) -> Standing:
        """waiting: bytes that tenants wait for and that do not use the tier yet; floors: bytes of their pins."""
        held = self.held()
        wants = {tenant: held.get(tenant, 0) + waiting.get(tenant, 0) for tenant in dict.fromkeys((*held, *waiting))}
        weights = {tenant: self._weight_of(tenant) for tenant in wants}
        return Standing(held, max_min(wants, weights, self.budget_bytes, floors))

    def is_alone(self, tenant_id: TenantId, wanted: Entry, without: Iterable[AdapterUid] = ()) -> bool:
        """Whether the tenant would claim nothing else, its pins aside."""
        gone = {wanted.uid, *without}
        return not any(
            tenant_id in entry.claims[self.tier] and tenant_id not in entry.pinned_by
            for uid, entry in self.entries.items()
            if uid not in gone
        )

    def plan(
        self,
        wanted: Entry,
        tenant_id: TenantId | None,
        more_bytes: int,
        standing: Standing,
        now: float,
        *,
        is_prefetch: bool = False,
    ) -> Plan | None:
        """What goes so that `more_bytes` fit; None: it cannot be. tenant_id: None: nobody in particular. For a guess
        goes what nobody claims or has used for long.
        """
        missing = self.used_bytes + more_bytes - self.budget_bytes
        if missing <= 0:
            return Plan()
        search = _Search(self, wanted, tenant_id, standing, missing, now)
        search.unclaimed()
        if wanted.is_guess:
            search.long_idle(self.borrow_after_s)
        elif tenant_id is not None:
            search.held[tenant_id] = search.held.get(tenant_id, 0) + more_bytes
            search.own_above_share()
            search.others_above_shares()
            if not is_prefetch:
                search.own()
        if not is_prefetch:
            search.long_idle(self.borrow_after_s)
            if search.waited_s >= self.patience_s:
                search.long_idle(lambda entry: 0.0)
        if search.missing > 0:
            return None
        return Plan(search.evictions, list(search.released))

    def give_way(self, over_bytes: int, standing: Standing, now: float) -> Sequence[Eviction]:
        """What may go so that the tier can be smaller by so much, as far as there is any: what nobody claims, what is
        claimed above shares, what nobody has used for long.
        """
        search = _Search(self, Entry(AdapterUid("")), None, standing, over_bytes, now)
        search.unclaimed()
        search.above_shares()
        search.long_idle(self.borrow_after_s)
        return search.evictions

    def weight(self, tenant_id: TenantId) -> int:
        return self._weight_of(tenant_id)

    def has_copy(self, entry: Entry) -> bool:
        return self.tier is AdapterTier.DEVICE and entry.on_host

    def borrow_after_s(self, entry: Entry) -> float:
        """How long it must be unused to go."""
        return self._borrow_copy_after_s if self.has_copy(entry) else self._borrow_after_s

    def may_go(self, entry: Entry, wanted: Entry, tenant_id: TenantId | None) -> bool:
        """Its claims aside."""
        if entry is wanted or entry.loading is not None or not entry.is_on(self.tier):
            return False
        if self.tier is AdapterTier.HOST and entry.on_device:
            return True  # a copy
        if self.tier is AdapterTier.DEVICE and entry.in_use:
            return False
        if not entry.queued:
            return True
        number = wanted.queued.get(tenant_id) if tenant_id is not None else None
        return number is not None and number < min(entry.queued.values())


class _Search:
    def __init__(
        self,
        room: TierRoom,
        wanted: Entry,
        tenant_id: TenantId | None,
        standing: Standing,
        missing: int,
        now: float,
    ) -> None:
        self.missing = missing  # bytes
        self.held = dict(standing.held)
        self.evictions: list[Eviction] = []
        self.released: dict[AdapterUid, None] = {}
        self.waited_s = 0.0  # as in Eviction
        self._gone: dict[AdapterUid, None] = {}
        self._room = room
        self._tier = room.tier
        self._wanted = wanted
        self._tenant = tenant_id
        self._shares = standing.shares
        self._now = now
        self._candidates = [e for e in room.entries.values() if room.may_go(e, wanted, tenant_id)]
        self._is_sorted = False

    def unclaimed(self) -> None:
        for entry in self._candidates:
            if self.missing > 0 and not entry.claims[self._tier]:
                self._evict(entry)

    def own_above_share(self) -> None:
        tenant = self._tenant
        assert tenant is not None
        share = self._shares.get(tenant, 0)
        if self.missing <= 0 or self.held[tenant] <= share:
            return
        mine = [e for e in self._candidates if e.uid not in self._gone and tenant in e.claims[self._tier]]
        mine.sort(key=lambda entry: self._order(entry, entry.claims[self._tier][tenant]))
        for entry in mine:
            if self.missing <= 0 or self.held[tenant] <= share:
                return
            if len(entry.claims[self._tier]) == 1:
                self._evict(entry)
            elif tenant not in entry.queued:
                self.released[entry.uid] = None
                self.held[tenant] -= entry.size_bytes

    def others_above_shares(self) -> None:
        tenant = self._tenant
        assert tenant is not None
        if self.missing <= 0:
            return
        mine, weight = self.held[tenant], self._room.weight(tenant)
        gone = (*self._gone, *self.released)
        is_alone = self._room.is_alone(tenant, self._wanted, gone)
        if is_alone:
            self.waited_s = self._now - self._wanted.no_room_since.get(tenant, self._now)
        is_within = mine <= self._shares.get(tenant, 0) or is_alone

        def gives(loser: TenantId) -> bool:
            held = self.held.get(loser, 0)
            if loser == tenant or held <= self._shares.get(loser, 0):
                return False
            return is_within or held * weight > mine * self._room.weight(loser)

        self._evict_if(lambda entry: all(gives(loser) for loser in self._claims(entry)))

    def above_shares(self) -> None:
        def is_above(tenant: TenantId) -> bool:
            return self.held.get(tenant, 0) > self._shares.get(tenant, 0)

        self._evict_if(lambda entry: all(map(is_above, self._claims(entry))))

    def own(self) -> None:
        self._evict_if(lambda entry: all(loser == self._tenant for loser in self._claims(entry)))

    def long_idle(self, after_s: Callable[[Entry], float]) -> None:
        def is_idle(entry: Entry) -> bool:
            used_at = max(self._claims(entry).values(), default=None)
            return used_at is None or self._now - used_at >= after_s(entry)

        self._evict_if(is_idle)

    def _evict_if(self, condition: Callable[[Entry], bool]) -> None:
        if self.missing > 0 and not self._is_sorted:
            self._candidates.sort(key=lambda e: self._order(e, max(e.claims[self._tier].values(), default=0.0)))
            self._is_sorted = True
        for entry in self._candidates:
            if self.missing <= 0:
                return
            if entry.uid not in self._gone and condition(entry):
                self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        claims = self._claims(entry)
        losers = {
            tenant: (self.held.get(tenant, 0), self._shares.get(tenant, 0), self._now - used_at)
            for tenant, used_at in claims.items()
        }
        has_copy = self._room.has_copy(entry)
        self.evictions.append(Eviction(entry.uid, self._tier, self._tenant, losers, self.waited_s, has_copy))
        for tenant in claims:
            self.held[tenant] -= entry.size_bytes
        self._gone[entry.uid] = None
        self.missing -= entry.size_bytes

    def _claims(self, entry: Entry) -> Mapping[TenantId, float]:
        claims = entry.claims[self._tier]
        if entry.uid in self.released:
            return {tenant: used_at for tenant, used_at in claims.items() if tenant != self._tenant}
        return claims

    def _order(self, entry: Entry, used_at: float) -> tuple[bool, bool, float, int]:
        """What others wait for goes last, and before it copies of what is on the device. Idle time counts by bytes."""
        is_copy = self._tier is AdapterTier.HOST and entry.on_device
        return (bool(entry.queued), is_copy, -(self._now - used_at) * entry.size_bytes, entry.last_tick)
