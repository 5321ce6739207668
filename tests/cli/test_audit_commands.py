"""The options of `audit`."""

from __future__ import annotations

from tests.cli.conftest import Manylora


async def test_what_is_wrong_usage(manylora: Manylora) -> None:
    for wrong in (["verify", "nowhere"], ["verify", "--public-key", "nowhere"], ["tail", "-n", "0"], ["export"]):
        assert (await manylora("audit", *wrong)).exit_code == 2, wrong
    assert "--public-key" in (await manylora("audit", "verify", "--help")).stdout
