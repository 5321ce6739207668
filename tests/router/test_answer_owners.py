"""Which of several routers has an idempotency key."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.links import answer_owners
from manylora_router.links.answer_owners import AnswerOwners, Claim, Owner
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import AnsweredElsewhere, AnswerLost, Overloaded, ServiceUnavailable
from manylora_sim import loop
from manylora_sim.store import MemoryStoreServer


def router_of(found: Owner | Claim) -> str:
    return found.record.router_id if isinstance(found, Owner) else ""


def claimed(found: Owner | Claim) -> Claim:
    assert isinstance(found, Claim)
    return found


async def routers(server: MemoryStoreServer, count: int) -> list[AnswerOwners]:
    store = server.client()
    for i in range(count):
        await store.put(keys.router(f"router-{i}"), RouterRecord(f"router-{i}", f"router-{i}:1", 1.0).to_json())
    return [AnswerOwners(server.client(), f"router-{i}", 1.0) for i in range(count)]


def test_one_of_many_gets_it() -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        all_of_them = await routers(server, 5)
        found = await asyncio.gather(*(each.claim("acme", "d", f"r{i}") for i, each in enumerate(all_of_them)))
        (winner,) = (i for i, owner in enumerate(found) if not router_of(owner))
        assert {router_of(owner) for owner in found} == {"", f"router-{winner}"}
        other = all_of_them[(winner + 1) % 5]
        assert await other.request_of("acme", "d") == f"r{winner}"
        later = await all_of_them[winner].claim("acme", "d", "again")
        assert isinstance(later, Claim), "its own that it does not know is about to go"
        await all_of_them[winner].release("acme", "d", claimed(found[winner]).revision)
        assert server.get(keys.answer("acme", "d")) is not None, "what was claimed since stays"
        begun = await all_of_them[winner].begin("acme", "d", "again", later)
        assert router_of(await other.claim("acme", "d", "x")) == f"router-{winner}"
        taken = await other.claim("acme", "d", "x", takes_over=True)
        with pytest.raises(AnsweredElsewhere):
            await all_of_them[winner].begin("acme", "d", "again", Claim(begun, 0))
        await other.release("acme", "d", claimed(taken).revision)
        assert server.get(keys.answer("acme", "d")) is None
        server.set_up(False)
        with pytest.raises(ServiceUnavailable):
            await other.claim("acme", "e", "x")
        await other.release("acme", "d", 1)
        for each in all_of_them:
            await each.close()

    loop.run(main(), seed=0)


@pytest.mark.parametrize("is_back", [False, True])
def test_what_was_begun_outlives_its_router_for_the_stated_time(is_back: bool) -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        first, second = await routers(server, 2)
        for digest in ("claimed", "begun"):
            claim = claimed(await first.claim("acme", digest, "r"))
        await first.begin("acme", "begun", "r", claim)
        await asyncio.sleep(answer_owners.LEASE_S * 2)
        assert router_of(await second.claim("acme", "begun", "s")) == "router-0", "it is renewed while its router lives"
        await first.close()
        if is_back:
            record = RouterRecord("router-0", "router-0:1", 2.0)
            await server.client().put(record.key, record.to_json())
            asks = AnswerOwners(server.client(), "router-0", 2.0)
        else:
            await server.client().delete(keys.router("router-0"))
            asks = second
        claimed(await asks.claim("acme", "claimed", "s"))
        assert await asks.request_of("acme", "begun") == ""
        await asyncio.sleep(answer_owners.LASTS_S - 1.0)
        with pytest.raises(AnswerLost, match="router-0"):
            await asks.claim("acme", "begun", "s")
        await asyncio.sleep(answer_owners.LEASE_S - answer_owners.LASTS_S + 2.0)
        claimed(await asks.claim("acme", "begun", "s"))
        await asks.close()
        await second.close()

    loop.run(main(), seed=0)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_a_stopped_router_charged_goes_with_the_key(is_whole: bool) -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        first, second, third = await routers(server, 3)
        claim = claimed(await first.claim("acme", "d", "r"))
        assert claim.charged_tokens == 0
        revision = await first.begin("acme", "d", "r", claim)
        await first.leave("acme", "d", "r", revision, 7, is_whole=is_whole)
        with pytest.raises(AnsweredElsewhere):
            await first.leave("acme", "d", "r", revision, 8, is_whole=is_whole)
        if is_whole:
            assert router_of(await second.claim("acme", "d", "s")) == "router-0"
            await server.client().delete(keys.router("router-0"))
            with pytest.raises(AnswerLost, match="router-0"):
                await second.claim("acme", "d", "s")
        claim = claimed(await second.claim("acme", "d", "s", takes_over=is_whole))
        assert claim.charged_tokens == 7
        revision = await second.begin("acme", "d", "s", claim)
        assert claimed(await third.claim("acme", "d", "t", takes_over=True)).charged_tokens == 7, "it was killed"
        for each in (first, second, third):
            await each.close()

    loop.run(main(), seed=0)


@pytest.mark.parametrize("num_parts", [1, 40, 49, 64])
def test_all_parts_of_a_call_have_one_place(num_parts: int) -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        (owners,) = await routers(server, 1)

        async def call(name: str) -> list[Owner | Claim | BaseException]:
            parts = (owners.claim("acme", f"{name} {part}", "r", call=name) for part in range(num_parts))
            return await asyncio.gather(*parts, return_exceptions=True)

        calls = await asyncio.gather(*(call(f"k{i}") for i in range(48)))
        assert {type(each) for found in calls for each in found} == {Claim}
        assert owners._asking.num_held == len(owners._parts) == 0
        server.set_up(False)
        late = [asyncio.create_task(call(f"late {i}")) for i in range(60)]
        kinds = [type(each) for task in late for each in await task]
        assert kinds.count(ServiceUnavailable) == 48 * num_parts
        assert kinds.count(Overloaded) == 12 * num_parts, "none of a call's parts, or all"
        assert {type(each) for each in await call("late")} == {ServiceUnavailable}
        assert owners._asking.num_held == len(owners._parts) == 0
        await owners.close()

    loop.run(main(), seed=0)
