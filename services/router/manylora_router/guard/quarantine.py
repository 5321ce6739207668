"""Quarantine of queries of death: a prompt that was there whenever workers failed is not run again for a while.

Owns the strikes of prompts, by a digest with a secret key.
"""

# A failure is one strike of a prompt that was in flight; MAX_STRIKES quarantine it, and then one more does. Any
# completion clears it.

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora_shared.ids import AdapterDigest, TenantId

MAX_STRIKES = 2
QUARANTINE_S = 300.0
MEMORY_S = 600.0  # after the last one
MAX_PROMPTS = 10_000


@dataclass(eq=False, slots=True)
class _Record:
    strikes: int
    last_worker: str
    last_at: float
    until: float | None = None  # the quarantine's end


class Quarantine:
    def __init__(self, getrandbits: Callable[[int], int]) -> None:
        self._getrandbits = getrandbits
        self._secret: bytes | None = None
        self._records: dict[bytes, _Record] = {}  # by their last strike

    def __len__(self) -> int:
        return len(self._records)

    def num_quarantined(self, tenant_id: str, now: float) -> int:
        """Of one tenant, or, empty, of all."""
        prefix = tenant_id.encode() + b"/" if tenant_id else b""
        return sum(r.until is not None and now < r.until for key, r in self._records.items() if key.startswith(prefix))

    def tenants(self, now: float) -> dict[TenantId, tuple[int, float]]:
        """Prompts, and seconds until the last is let through."""
        found: dict[TenantId, tuple[int, float]] = {}
        for key, record in self._records.items():
            if record.until is not None and now < record.until:
                tenant_id = TenantId(key.partition(b"/")[0].decode())
                count, longest_s = found.get(tenant_id, (0, 0.0))
                found[tenant_id] = count + 1, max(longest_s, record.until - now)
        return found

    def wait_s(
        self, tenant: TenantId, adapter: AdapterDigest | None, prompt_token_ids: Sequence[int], now: float
    ) -> float | None:
        """None: the prompt is let through."""
        if not self._records:
            return None
        record = self._records.get(self._key(tenant, adapter, prompt_token_ids))
        return record.until - now if record is not None and record.until is not None and now < record.until else None

    def lift(self, tenant: TenantId, now: float) -> int:
        """Returns how many prompts were quarantined."""
        prefix = tenant.encode() + b"/"
        lifted = self.num_quarantined(tenant, now)
        self._records = {key: record for key, record in self._records.items() if not key.startswith(prefix)}
        return lifted

    def strike(
        self,
        tenant: TenantId,
        adapter: AdapterDigest | None,
        prompt_token_ids: Sequence[int],
        *,
        worker_id: str,
        since: float,
        now: float,
    ) -> bool:
        """Returns whether this quarantines the prompt. `since`: a request that the worker began before the prompt's
        last strike there was ended by the same failure.
        """
        key = self._key(tenant, adapter, prompt_token_ids)
        record = self._records.pop(key, None)
        if record is None or (now - record.last_at > MEMORY_S and (record.until is None or now >= record.until)):
            record = _Record(0, "", 0.0)
        self._records[key] = record
        if record.last_worker == worker_id and since <= record.last_at:
            return False
        record.strikes = min(record.strikes + 1, MAX_STRIKES)
        record.last_worker, record.last_at = worker_id, now
        while len(self._records) > MAX_PROMPTS:
            del self._records[next(iter(self._records))]
        if record.strikes < MAX_STRIKES or (record.until is not None and now < record.until):
            return False
        record.until = now + QUARANTINE_S
        return True

    def clear(self, tenant: TenantId, adapter: AdapterDigest | None, prompt_token_ids: Sequence[int]) -> None:
        if self._records:
            self._records.pop(self._key(tenant, adapter, prompt_token_ids), None)

    def _key(self, tenant: TenantId, adapter: AdapterDigest | None, prompt_token_ids: Sequence[int]) -> bytes:
        if self._secret is None:
            # Drawn when it is first needed: a run without failures draws what it drew before there was a quarantine.
            self._secret = self._getrandbits(256).to_bytes(32, "big")
        digest = hashlib.blake2b((adapter or "").encode() + b"\0", key=self._secret, digest_size=16)
        digest.update(array("I", prompt_token_ids).tobytes())
        return tenant.encode() + b"/" + digest.digest()
