"""The options of `tenant`."""

from __future__ import annotations

from tests.cli.conftest import Manylora


async def test_what_is_wrong_usage(manylora: Manylora) -> None:
    for wrong in (["apply"], ["apply", "-", "--expect-version", "-1"], ["get"], ["delete"], ["lift-quarantine"]):
        assert (await manylora("tenant", *wrong)).exit_code == 2, wrong
    told = (await manylora("tenant", "delete", "--help")).stdout
    assert all(option in told for option in ("--yes", "--json", "--server", "--key"))
