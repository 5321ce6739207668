"""Which workers of a pool are one tenant's with one adapter, as the policies ask. Pure; it only decides.

One worker changes at a time, and one that is everybody's stays, whatever policies ask: where none is left for a while,
a dedicated one comes back. A worker that could not merge an adapter is left alone with it for RETRY_S.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from manylora_shared.ids import WorkerId
from manylora_shared.merge_share import merged_workers

from manylora_scheduler.core.reports import Owner
from manylora_scheduler.core.worker_view import WorkerView
from manylora_scheduler.gates.recent_use import PoolUse

RETRY_S = 60.0
SETTLE_S = 5.0  # for workers to tell a new leader what they are
LONELY_S = 3.0  # how long nobody may be everybody's


class Change(NamedTuple):
    worker_id: WorkerId
    owner: Owner | None


class Advice(NamedTuple):
    use: PoolUse
    workers: int  # that it fills by itself
    pool_workers: int


def advice(uses: Iterable[PoolUse], workers_of: Mapping[str, Collection[WorkerView]]) -> list[Advice]:
    """Adapters that fill more workers of their pool than they have dedicated, where these can merge any."""
    found: list[Advice] = []
    for use in uses:
        members = [worker for worker in workers_of.get(use.pool, ()) if worker.connected]
        owner = Owner(use.adapter_uid, use.tenant_id)
        own = min(merged_workers(use.share, len(members)), sum(worker.can_merge for worker in members))
        if own > sum(worker.owner == owner for worker in members):
            found.append(Advice(use, own, len(members)))
    return found


class DedicationPlan:
    """Of one pool."""

    def __init__(self, now: float) -> None:
        self._begun_at = now
        self._lonely_since: float | None = None
        self._failed: dict[tuple[WorkerId, Owner], float] = {}  # until when

    def look(self, wanted: Mapping[Owner, int], workers: Collection[WorkerView], now: float) -> list[Change]:
        """wanted: how many workers each owner is to have."""
        if now < self._begun_at + SETTLE_S and not all(worker.connected for worker in workers):
            return []
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        changes = self._given_up(wanted, workers, now)
        if not any(worker.serving for worker in workers):
            return changes or self._come_back(workers, now)
        self._lonely_since = None
        if changes:
            return [self._passed_on(change, wanted, workers) for change in changes[:1]] + changes[1:]
        is_changing = any(not w.serves_owner and not w.is_everybodys and w.connected for w in workers)
        return [] if is_changing else self._taken(wanted, workers)

    def _given_up(self, wanted: Mapping[Owner, int], workers: Collection[WorkerView], now: float) -> list[Change]:
        kept: dict[Owner, int] = {}
        changes: list[Change] = []
        for worker in sorted(workers, key=lambda w: (not w.serves_owner, w.worker_id)):
            owner, told = worker.owner, worker.told_owner
            if owner is None:
                continue
            has_failed = told.owner is None and told.is_ready and bool(told.problem)
            if has_failed:
                self._failed[worker.worker_id, owner] = now + RETRY_S
            if has_failed or kept.get(owner, 0) >= wanted.get(owner, 0):
                changes.append(Change(worker.worker_id, None))
            else:
                kept[owner] = kept.get(owner, 0) + 1
        return changes

    def _passed_on(self, change: Change, wanted: Mapping[Owner, int], workers: Collection[WorkerView]) -> Change:
        """A new version comes in the place of the one before, without a way back to everybody."""
        (worker,) = [each for each in workers if each.worker_id == change.worker_id]
        before = worker.owner
        for owner, count in sorted(wanted.items()):
            has_enough = sum(each.owner == owner for each in workers) >= count
            is_next = before is not None and owner != before and owner.tenant_id == before.tenant_id
            if is_next and worker.serves_owner and not has_enough and (worker.worker_id, owner) not in self._failed:
                return Change(worker.worker_id, owner)
        return change

    def _come_back(self, workers: Collection[WorkerView], now: float) -> list[Change]:
        if self._lonely_since is None:
            self._lonely_since = now
        if any(worker.connected and worker.owner is None and not worker.draining for worker in workers):
            return []  # it is on its way
        able = [worker for worker in workers if worker.owner is not None and worker.connected and not worker.draining]
        if now < self._lonely_since + LONELY_S or not able:
            return []
        return [Change(min(able, key=lambda w: (w.slotted_sequences, w.worker_id)).worker_id, None)]

    def _taken(self, wanted: Mapping[Owner, int], workers: Collection[WorkerView]) -> list[Change]:
        free = [worker for worker in workers if worker.serving]
        if len(free) < 2:
            return []
        for owner, count in sorted(wanted.items()):
            if sum(worker.owner == owner for worker in workers) >= count:
                continue
            able = [w for w in free if w.can_merge and (w.worker_id, owner) not in self._failed]
            if able:

                def rank(worker: WorkerView, owner: Owner = owner) -> tuple[int, int, WorkerId]:
                    nearness = worker.residency(owner.adapter_uid)
                    return -nearness, worker.slotted_sequences, worker.worker_id

                return [Change(min(able, key=rank).worker_id, owner)]
        return []
