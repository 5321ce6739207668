"""What a tenant's rule says of scores."""

from __future__ import annotations

from manylora_shared.tenancy.adapter_gate import GateRule


def test_each_bound_is_told_with_its_numbers() -> None:
    rule = GateRule("golden", min_score=0.8, max_drop=0.1, min_gain=0.3)
    assert rule.broken({"candidate": 0.8, "before": 0.9, "base": 0.5}) == []
    assert len(rule.broken({"candidate": 0.79, "before": 0.9, "base": 0.5})) == 3
    assert "below the 0.9 of the version in force" in rule.broken({"candidate": 0.79, "before": 0.9})[1]
    assert rule.broken({"candidate": 0.8}) == []


def test_a_version_may_fall_a_little_where_the_rule_does_not_say() -> None:
    assert GateRule("golden").broken({"candidate": 0.98, "before": 1.0, "base": 1.0}) == []
    assert len(GateRule("golden").broken({"candidate": 0.97, "before": 1.0, "base": 0.0})) == 1
