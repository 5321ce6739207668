"""The leader's judgement of rollouts: routers' counts go into trials, and what a trial finds becomes one transaction on
the adapter's record, guarded by what was read of it and by this term's leadership.

Owns the trials of one term. Their progress stands in the records: a next leader goes on from there, ten seconds behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora.v1 import scheduler_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, KeyValue, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.ids import is_valid_name
from manylora_shared.process.clock import WallClock
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.adapter_line import Line, Rollout
from manylora_shared.tenancy.trial import MAX_TRIALS, Decision, Plan, Progress, Trial, Verdict, VersionCounts

_LOG = logging.getLogger(__name__)
JUDGE_S = 1.0
SAVE_S = 10.0
FORGET_S = 60.0  # one that no router tells of

Key = tuple[str, str, str]  # tenant, name and trial


@dataclass(eq=False)
class _Tried:
    heard_at: float
    counts: tuple[VersionCounts, VersionCounts] = field(default_factory=lambda: (VersionCounts(), VersionCounts()))
    trial: Trial | None = None  # once its record was read
    percent: int = 0
    saved_at: float = 0.0
    saved: Progress | None = None


class Rollouts:
    def __init__(self, store: Store, epoch: int, telemetry: Telemetry, clock: WallClock) -> None:
        self._store = store
        self._epoch = epoch
        self._telemetry = telemetry
        self._clock = clock
        self._tried: dict[Key, _Tried] = {}

    def __len__(self) -> int:
        return len(self._tried)

    def take(self, message: scheduler_pb2.TrialCounts, now: float) -> None:
        key = message.tenant_id, message.name, message.trial
        tried = self._tried.get(key)
        if tried is None:
            if len(self._tried) >= MAX_TRIALS or not all(is_valid_name(name) for name in key[:2]):
                return
            self._tried[key] = tried = _Tried(now)
        tried.heard_at = now
        for counts, told in zip(tried.counts, (message.canary, message.stable), strict=True):
            counts.add(_counts(told))

    async def run(self) -> None:
        """Ends by cancellation."""
        while True:
            await asyncio.sleep(JUDGE_S)
            for key, tried in list(self._tried.items()):
                try:
                    is_standing = await self._judge(key, tried)
                except StoreUnavailable as e:
                    more = fields(tenant=key[0], adapter=key[1], error=str(e))
                    _LOG.warning("a rollout is not judged while the store is away", extra=more)
                    break
                except Exception:
                    # one trial's bug ends no other's, nor the term: it is begun anew, from its record, with the next
                    # counts
                    _LOG.exception("what nobody foresaw ends a trial", extra=fields(tenant=key[0], adapter=key[1]))
                    is_standing = False
                if not is_standing:
                    del self._tried[key]

    async def _judge(self, key: Key, tried: _Tried) -> bool:
        """False: there is no such trial any more."""
        now = asyncio.get_running_loop().time()
        if now - tried.heard_at > FORGET_S:
            return False
        tenant_id, name, trial_id = key
        stored = await self._store.get(keys.adapter(tenant_id, name))
        line = _line(stored)
        rollout = line.rollout if line is not None else None
        plan = rollout.plan if rollout is not None else None
        if stored is None or line is None or rollout is None or plan is None or plan.trial != trial_id:
            return False
        trial = self._trial(tried, rollout, plan, now)
        counts, tried.counts = tried.counts, (VersionCounts(), VersionCounts())
        trial.take(*counts, now)
        verdict = trial.verdict(rollout.to, line.in_force.number, self._clock.now_unix_s())
        if verdict is not None:
            after = line.judged(verdict, self._clock.now_unix_s()).progressed(Progress(0, 0, trial.progress.findings))
        elif now - tried.saved_at >= SAVE_S and trial.progress != tried.saved:
            after = line.progressed(trial.progress)
        else:
            return True
        record = AdapterRecord.of(tenant_id, name, after)
        leading = Compare(keys.SCHEDULER_LEADER, self._epoch)
        result = await self._store.txn(
            [Compare(stored.key, stored.mod_revision), leading], [Put(stored.key, record.to_json())]
        )
        if not result.succeeded:
            return True  # somebody changed it, or leads: the next look says which
        tried.saved_at, tried.saved = now, trial.progress
        if verdict is not None:
            self._tell(key, rollout, verdict)
        return verdict is None or verdict.decision is Decision.STEP

    def _trial(self, tried: _Tried, rollout: Rollout, plan: Plan, now: float) -> Trial:
        if tried.trial is None:
            progress = rollout.progress[0] if rollout.progress else Progress()
            tried.trial, tried.percent, tried.saved_at = Trial(plan, rollout.percent, progress), rollout.percent, now
        elif tried.percent != rollout.percent:
            tried.trial.stepped(plan, rollout.percent)
            tried.percent = rollout.percent
        return tried.trial

    def _tell(self, key: Key, rollout: Rollout, verdict: Verdict) -> None:
        labels = {Attribute.KIND: verdict.decision.value, Attribute.REASON: verdict.reason}
        self._telemetry.count(Metrics.ROLLOUT_DECISIONS, 1, labels)
        to, percent = rollout.to, verdict.percent
        more = fields(tenant=key[0], adapter=key[1], version=to, percent=percent, why=verdict.why)
        level = logging.WARNING if verdict.decision is Decision.ROLLBACK else logging.INFO
        _LOG.log(level, "a rollout decided: %s", verdict.decision.value, extra=more)


def _line(stored: KeyValue | None) -> Line | None:
    try:
        return AdapterRecord.stored(stored).line if stored is not None else None
    except ValueError as e:
        _LOG.error("an adapter's record cannot be read", extra=fields(error=str(e)))
        return None


def _counts(message: scheduler_pb2.VersionCounts) -> VersionCounts:
    maps: tuple[Mapping[int, int], ...] = (message.cold, message.warm, message.token, message.scores)
    cold, warm, token, scores = (dict(each) for each in maps)
    return VersionCounts(message.completed, message.failed, message.cut, cold, warm, token, scores)
