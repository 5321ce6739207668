"""GetUsage: who reads what of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from manylora.v1 import usage_pb2
from manylora_router.admin.usage import MAX_READS
from manylora_shared.errors import Code, RpcError
from manylora_shared.ledger.prices import PriceList, Prices
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, Sum
from router_fakes import ADMIN, RouterCluster, simulate, text_request, until

from tests.memory_ledger import RouterLedger


async def _get(cluster: RouterCluster, key: str = "", **fields: object) -> usage_pb2.GetUsageResponse:
    channel = cluster.caller(key) if key else cluster.client
    return await channel.call(ADMIN["GetUsage"], usage_pb2.GetUsageRequest(**fields))  # type: ignore[arg-type, no-any-return]


async def _fill(cluster: RouterCluster) -> None:
    for tenant in ("acme", "acme", "other"):
        await cluster.ask(text_request("abcd"), x_tenant_id=tenant)


def test_rows_come_in_pages_and_sums_at_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        await _fill(cluster)
        first = await _get(cluster, limit=2)
        rest = await _get(cluster, limit=2, after=first.after)
        rows = [*first.rows, *rest.rows]
        assert sorted(row.tenant for row in rows) == ["acme", "acme", "other"]  # they end at one time of the fake clock
        assert rest.after == ""
        assert all((row.requests, row.prompt_tokens, row.outcome) == (1, 4, "completed") for row in rows)
        sums = (await _get(cluster, by=["tenant", "day"])).rows
        assert [(row.tenant, row.requests, row.prompt_tokens) for row in sums] == [("acme", 2, 8), ("other", 1, 4)]
        assert len(sums[0].day) == 10
        (total,) = (await _get(cluster, total=True)).rows
        assert total.requests == 3
        assert not (await _get(cluster, since_unix_s=rows[-1].ended_unix_s + 1)).rows

    simulate(test)


def test_unit_prices_are_told_in_the_place_of_rows() -> None:
    async def test(cluster: RouterCluster) -> None:
        assert not (await _get(cluster, unit_prices=True)).unit_prices
        versions = (Prices(100.0, "d1", million_prompt_tokens=7), Prices(200.0, "d2", adapter_load=9))
        cluster.ledger.prices = PriceList("public", "EUR", versions)
        told = await _get(cluster, unit_prices=True, until_unix_s=150.0)
        assert (told.price_list, told.currency, len(told.rows)) == ("public", "EUR", 0)
        (first,) = told.unit_prices
        assert (first.day, first.million_prompt_tokens, first.adapter_load) == ("d1", 7, 0)
        assert len((await _get(cluster, unit_prices=True)).unit_prices) == 2

    simulate(test)


def test_large_amounts_and_degraded_rows() -> None:
    async def test(cluster: RouterCluster) -> None:
        row = UsageRow(request_id="r", tenant="acme", degraded=True, decode_flops=1 << 62, qos_class="batch")
        cluster.ledger.rows["r"] = row
        (told,) = (await _get(cluster)).rows
        assert (told.degraded, told.decode_flops, told.qos_class) == (1, float(1 << 62), "batch")
        (told,) = (await _get(cluster, by=["class"])).rows
        assert (told.degraded, told.qos_class) == (1, "batch")
        cluster.ledger.rows.clear()

    simulate(test)


def test_a_tenants_admin_reads_its_own_and_nobody_else_any() -> None:
    async def test(cluster: RouterCluster) -> None:
        await _fill(cluster)
        admin = await cluster.put_key(tenant="other", scopes=("admin",))
        user = await cluster.put_key(tenant="other", scopes=("generate",))
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        assert [row.tenant for row in (await _get(cluster, admin)).rows] == ["other"]
        assert [row.tenant for row in (await _get(cluster, admin, by=["tenant"])).rows] == ["other"]
        for key, tenant in ((admin, "acme"), (user, ""), (user, "other")):
            with pytest.raises(RpcError) as refused:
                await _get(cluster, key, tenant_id=tenant)
            assert refused.value.code is Code.PERMISSION_DENIED

    simulate(test)


def test_tenants_take_turns_at_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for much holds two threads at most, and its other reads wait for themselves."""

    async def test(cluster: RouterCluster) -> None:
        go_on, reading, most = asyncio.Event(), 0, 0
        read: list[str] = []

        async def slow(self: object, query: Query, by: Sequence[str]) -> list[Sum]:
            nonlocal reading, most
            read.append(query.tenant)
            reading += 1
            most = max(most, reading)
            await go_on.wait()
            reading -= 1
            return []

        monkeypatch.setattr(RouterLedger, "sums", slow)
        keys = [await cluster.put_key(tenant=tenant, scopes=("admin",)) for tenant in ("acme", "other")]
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        asking = [asyncio.create_task(_get(cluster, keys[0], total=True)) for _ in range(12)]
        await until(lambda: reading == MAX_READS)
        asking.append(asyncio.create_task(_get(cluster, keys[1], total=True)))
        await asyncio.sleep(0.1)
        go_on.set()
        await asyncio.gather(*asking)
        assert most == MAX_READS
        assert read.index("other") <= MAX_READS + 1, read

    simulate(test)


def test_what_is_asked_wrongly_is_told() -> None:
    async def test(cluster: RouterCluster) -> None:
        for fields, told in (({"by": ["colour"]}, "by"), ({"limit": 5000}, "limit")):
            with pytest.raises(RpcError, match=told) as refused:
                await _get(cluster, **fields)
            assert refused.value.code is Code.INVALID_ARGUMENT
        cluster.app.admin._usage._ledger = None
        with pytest.raises(RpcError, match="keeps no usage ledger"):
            await _get(cluster)

    simulate(test)
