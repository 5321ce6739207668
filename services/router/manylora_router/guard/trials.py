"""What this router saw of versions that are tried, until the scheduler's leader is told: it judges. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manylora_shared.ids import AdapterName, TenantId
from manylora_shared.tenancy.slo import bucket_of
from manylora_shared.tenancy.trial import SCORE_LEVELS, VersionCounts

from manylora_router.guard.admission import Adapter

TrialKey = tuple[TenantId, AdapterName, str]
Counts = tuple[VersionCounts, VersionCounts]  # of canary and stable


@dataclass(frozen=True)
class Outcome:
    """Of a request that completed, or failed by its version's own fault. None: it did not come so far."""

    has_failed: bool
    is_cut: bool = False
    ttft_ms: float | None = None  # without the wait for its adapter's load
    is_warm: bool = False  # some of its prompt was cached
    tpot_ms: float | None = None
    is_apart: bool = False  # the version in force has workers of its own: times of the two are not compared


class Trials:
    """Counts for those that stand, whose number AdminService bounds."""

    def __init__(self) -> None:
        self._counts: dict[TrialKey, Counts] = {}

    def stand(self, keys: Collection[TrialKey]) -> None:
        """From now on; of others what was counted is forgotten."""
        self._counts = {key: self._counts.get(key) or (VersionCounts(), VersionCounts()) for key in keys}

    def ended(self, tenant: TenantId, adapter: Adapter, outcome: Outcome) -> None:
        counts = self._of(tenant, adapter)
        if counts is None:
            return
        if outcome.has_failed:
            counts.failed += 1
            return
        counts.completed += 1
        counts.cut += outcome.is_cut
        if outcome.is_apart:
            return
        if outcome.ttft_ms is not None:
            _count(counts.warm if outcome.is_warm else counts.cold, bucket_of(outcome.ttft_ms))
        if outcome.tpot_ms is not None:
            _count(counts.token, bucket_of(outcome.tpot_ms))

    def scored(self, tenant: TenantId, adapter: Adapter, score: float) -> None:
        counts = self._of(tenant, adapter)
        if counts is not None:
            _count(counts.scores, round(score * SCORE_LEVELS))

    def take(self) -> dict[TrialKey, Counts]:
        """Of all that stand, empty ones too."""
        counts, self._counts = self._counts, {key: (VersionCounts(), VersionCounts()) for key in self._counts}
        return counts

    def _of(self, tenant: TenantId, adapter: Adapter) -> VersionCounts | None:
        if not adapter.trial:
            return None
        counts = self._counts.get((tenant, adapter.parts[0].name, adapter.trial))
        return counts[0 if adapter.is_canary else 1] if counts is not None else None


def _count(counts: dict[int, int], key: int) -> None:
    counts[key] = counts.get(key, 0) + 1
