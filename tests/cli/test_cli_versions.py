"""What is shown of an adapter's versions."""

from __future__ import annotations

from tests.cli.conftest import Manylora


async def test_history_names_each_version_and_what_became_of_it(manylora: Manylora) -> None:
    out = await manylora("adapter", "history", "up", "--tenant", "acme")
    assert out.exit_code == 0
    for state in ("in force", "rollout 10 %", "retired"):
        assert state in out.stdout
    assert "1970-01-01T00:00:00+00:00 rollout 2 to 10 %\n" in out.stdout
