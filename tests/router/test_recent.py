"""What one request leaves in each of the three books."""

from __future__ import annotations

from manylora_router.history.lives import Life
from manylora_router.history.recent import Recent


def test_a_request_from_its_coming_to_its_end() -> None:
    recent = Recent()
    life = Life("r", "acme", "standard", 1.0)
    recent.came(life)
    recent.close_step([life], 10.0)
    life.started_at, life.adapter, life.adapter_found, life.prompt_tokens = 11.0, "a@1", "host", 5
    recent.close_step([life], 20.0)
    recent.tokens_came(life, 3, 21.0)
    recent.tokens_came(life, 3, 22.0)
    recent.ended(life, "completed", 23.0, is_completed=True, is_rejected=False)
    recent.close_step([], 30.0)
    rows = [row for row in recent.samples.rows("acme") if row is not None]
    assert [(row.waiting, row.running, row.completion_tokens, row.requests) for row in rows] == [
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 6, 1),
    ]
    assert rows[2].prompt_tokens == 5
    use = recent.adapters.get("acme", "a@1")
    assert use is not None
    assert (use.on_host, use.requests) == (1, 1)
    assert recent.lives.get("acme", "r") is life
    assert (life.outcome, life.ended_at) == ("completed", 23.0)


def test_a_refused_request_used_no_adapter() -> None:
    recent = Recent()
    life = Life("r", "acme", "standard", 1.0, adapter="a@1")
    recent.came(life)
    recent.ended(life, "overloaded", 2.0, is_completed=False, is_rejected=True)
    recent.close_step([], 10.0)
    assert len(recent.adapters) == 0
    row = recent.samples.rows("acme")[0]
    assert row is not None
    assert (row.requests, row.rejected, row.failed) == (1, 1, 0)
