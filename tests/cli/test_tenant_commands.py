"""The options of `tenant`."""

from __future__ import annotations

from tests.cli.conftest import Manylora


async def test_what_is_wrong_usage(manylora: Manylora) -> None:
    versions = (["apply", "-", "--expect-version", version] for version in ("-1", str(2**64), "9" * 400))
    for wrong in (["apply"], *versions, ["get"], ["delete"], ["lift-quarantine"]):
        assert (await manylora("tenant", *wrong)).exit_code == 2, wrong
    told = (await manylora("tenant", "delete", "--help")).stdout
    assert all(option in told for option in ("--yes", "--json", "--server", "--key"))
