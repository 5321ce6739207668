"""A tenant's large messages come at its pace, and nobody waits for another's."""

from __future__ import annotations

import asyncio

from manylora_router.front.pace import bytes_pace
from manylora_sim.loop import run

MIB = 1 << 20


def test_a_tenant_has_its_burst_then_its_rate_and_no_more_waits_than_fits() -> None:
    async def main() -> None:
        loop, pace = asyncio.get_running_loop(), bytes_pace(10 * MIB)
        await asyncio.sleep(10)
        began = loop.time()
        for _ in range(10):
            await pace.wait("acme", MIB)
        assert loop.time() == began
        ends = []

        async def one() -> None:
            await pace.wait("acme", MIB)
            ends.append(round(loop.time() - began, 3))

        told = await asyncio.gather(*(one() for _ in range(30)), pace.wait("other", MIB), return_exceptions=True)
        refused = [str(each) for each in told if each is not None]
        assert len(refused) == 9
        assert "more than 10 MiB a second" in refused[0]
        assert ends == [n / 10 for n in range(21)]
        assert told[-1] is None

    run(main(), seed=0)
