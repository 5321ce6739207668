"""What one key may use of its tenant's quotas. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_shared.errors import FieldViolation

MAX_LIMIT = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """0: no limit of its own."""

    key_id: str
    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrency: int = 0


def limit_problems(**limits: int) -> list[FieldViolation]:
    return [
        FieldViolation(name, f"must be from 0 (none) to {MAX_LIMIT}")
        for name, value in limits.items()
        if not 0 <= value <= MAX_LIMIT
    ]
