"""What a tenant is likely to ask for next, by its last hour on this worker: what followed the adapter that it asked for
just now, then what it asks for most. EngineCore writes it; one tenant's habits say nothing of another's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from manylora_shared.ids import AdapterUid, TenantId

LIKELY = 2  # at a time
FORGET_S = 3600.0
HALF_LIFE_S = 1200.0
MAX_TENANTS = 1024
MAX_ADAPTERS = 128  # of a tenant; those that were asked for longest ago are forgotten
MAX_SUCCESSORS = 4  # of an adapter
_LEAST = 1.5  # less was no habit: one request, a while ago


class Prediction:
    def __init__(self) -> None:
        self._tenants: OrderedDict[TenantId, _Habits] = OrderedDict()

    def asked(self, tenant_id: TenantId, uids: Sequence[AdapterUid], now: float) -> list[AdapterUid]:
        """Notes a request's adapters, and tells what may come next, the likeliest first; without these."""
        habits = self._tenants.get(tenant_id)
        if habits is None:
            habits = self._tenants[tenant_id] = _Habits()
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        found = [likely for uid in uids for likely in habits.asked(uid, now)]
        return [likely for likely in dict.fromkeys(found) if likely not in uids][:LIKELY]


class _Habits:
    def __init__(self) -> None:
        self._scores: OrderedDict[AdapterUid, tuple[float, float]] = OrderedDict()  # (score, when it was)
        self._successors: dict[AdapterUid, dict[AdapterUid, int]] = {}
        self._last: AdapterUid | None = None

    def asked(self, uid: AdapterUid, now: float) -> list[AdapterUid]:
        self._scores[uid] = (self._score(uid, now) + 1.0, now)
        self._scores.move_to_end(uid)
        if self._last is not None and self._last != uid:
            self._follows(self._last, uid)
        self._last = uid
        while self._scores and (
            len(self._scores) > MAX_ADAPTERS or now - next(iter(self._scores.values()))[1] > FORGET_S
        ):
            gone, _ = self._scores.popitem(last=False)
            self._successors.pop(gone, None)
        following = self._successors.get(uid, {})
        likely = sorted((each for each in following if each in self._scores), key=lambda each: -following[each])
        often = sorted(self._scores, key=lambda each: -self._score(each, now))
        habits = (each for each in (*likely, *often) if each != uid and self._score(each, now) >= _LEAST)
        return list(dict.fromkeys(habits))[:LIKELY]

    def _score(self, uid: AdapterUid, now: float) -> float:
        score, at = self._scores.get(uid, (0.0, now))
        return score * math.exp2((at - now) / HALF_LIFE_S)

    def _follows(self, before: AdapterUid, uid: AdapterUid) -> None:
        following = self._successors.setdefault(before, {})
        following[uid] = following.get(uid, 0) + 1
        if len(following) > MAX_SUCCESSORS:
            del following[min(following, key=lambda each: following[each])]
