"""What is shown of an adapter's versions."""

from __future__ import annotations

from tests.cli.conftest import Manylora


async def test_history_names_each_version_and_what_became_of_it(manylora: Manylora) -> None:
    out = await manylora("adapter", "history", "up", "--tenant", "acme")
    assert out.exit_code == 0
    for state in ("in force", "rollout 10 %", "retired"):
        assert state in out.stdout
    assert "1970-01-01T00:00:00+00:00 rollout 2 to 10 %\n" in out.stdout
    assert "rollback 1, before it 1: errors: many\n" in out.stdout
    assert "evidence against the version 2.5 of 100; in this step 7 of its requests and 70 others\n" in out.stdout
    assert "  errors: 25.0% of 8, 0.0% of 80 (evidence 9)\n" in out.stdout
