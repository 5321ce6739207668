"""Which of several routers has an idempotency key."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.links.answer_owners import AnswerOwners
from manylora_shared.coordination import keys
from manylora_shared.errors import ServiceUnavailable
from manylora_sim import loop
from manylora_sim.store import MemoryStoreServer


def test_one_of_many_gets_it() -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        leases = [await server.client().grant(10) for _ in range(5)]
        routers = [AnswerOwners(server.client(), f"router-{i}", lambda i=i: leases[i]) for i in range(5)]  # type: ignore[misc]
        found = await asyncio.gather(*(router.claim("acme", "d") for router in routers))
        (winner,) = (i for i, (owner, _) in enumerate(found) if not owner)
        assert {owner for owner, _ in found if owner} == {f"router-{winner}"}
        (again, later) = await routers[winner].claim("acme", "d")
        assert again == "", "its own of an earlier life is taken over"
        await routers[winner].release("acme", "d", found[winner][1])
        assert server.get(keys.answer("acme", "d")) is not None, "what was claimed since stays"
        await routers[winner].release("acme", "d", later)
        assert server.get(keys.answer("acme", "d")) is None
        assert (await routers[0].claim("acme", "d"))[0] == ""
        server.expire_lease(leases[0])
        assert (await routers[1].claim("acme", "d"))[0] == "", "it goes with its router"
        with pytest.raises(ServiceUnavailable):
            await routers[0].claim("acme", "e")
        server.set_up(False)
        with pytest.raises(ServiceUnavailable):
            await routers[1].claim("acme", "e")
        await routers[1].release("acme", "d", 1)

    loop.run(main(), seed=0)
