from __future__ import annotations

from manylora.client import Client

from tests.cli.fake_server import FakeRouter


async def test_the_client_reads_rows_and_sums(router: FakeRouter, address: str) -> None:
    async with Client(address, key="") as client:
        rows = [row["request_id"] async for row in client.usage.rows(tenant="acme")]
        sums, currency = await client.usage.sums(["tenant"], until_unix_s=5.0)
    assert rows == ["r0", "r1", "r2"]
    assert (sums[0]["tenant"], sums[0]["requests"], currency) == ("acme", 3, "EUR")
    assert router.usage_asked[-1].until_unix_s == 5.0
