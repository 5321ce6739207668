"""A request's times become stages and pauses."""

from __future__ import annotations

from manylora_router.history.lives import MAX_LIVES_OF_TENANT, Life, new_lives


def test_stages_in_order() -> None:
    life = Life("r", "acme", "standard", 10.0)
    seen = [life.stage]
    for name in ("admitted_at", "granted_at", "started_at", "first_token_at", "ended_at"):
        setattr(life, name, 11.0)
        seen.append(life.stage)
    assert seen == ["admission", "queued", "granted", "prefill", "streaming", "ended"]


def test_a_request_that_waits_for_its_adapter_says_so() -> None:
    life = Life("r", "acme", "standard", 10.0, adapter_found="store", admitted_at=1.0, granted_at=1.0, started_at=1.0)
    assert life.stage == "adapter"


def test_the_longest_pause_is_kept() -> None:
    life = Life("r", "acme", "standard", 0.0)
    for at in (1.0, 1.5, 4.0, 4.1):
        life.tokens_came(at)
    assert (life.first_token_at, life.last_token_at) == (1.0, 4.1)
    assert (life.longest_pause_s, life.pause_ended_at) == (2.5, 4.0)


def test_a_floods_lives_are_its_own() -> None:
    lives = new_lives()
    lives.put("quiet", "q", Life("q", "quiet", "", 0.0))
    for number in range(50_000):
        lives.put("loud", str(number), Life(str(number), "loud", "", 0.0))
    assert len(lives) == MAX_LIVES_OF_TENANT + 1
