"""Leases, elections and mirrors on the model, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest
from manylora_shared.coordination.base import KeyValue, StoreUnavailable
from manylora_shared.coordination.session import Election, LeaseSession, Mirror
from manylora_sim.loop import SimLoop, run
from manylora_sim.store import MemoryStore, MemoryStoreServer

SEEDS = range(10)
TTL_S = 2


def now() -> float:
    return asyncio.get_running_loop().time()


def run_seeds(main: Any) -> None:
    """Runs `main(server)` on a store with a little delay, for each seed."""
    for seed in SEEDS:

        async def body(seed: int = seed) -> None:
            server = MemoryStoreServer(random.Random(seed), min_delay_s=0.0005, max_delay_s=0.01, watch_delay_s=0.01)
            await main(server)
            assert server.leases == ()

        run(body(), seed=seed, limit_s=600)


async def within(seconds: float, main: Awaitable[Any]) -> Any:
    started = now()
    result = await asyncio.wait_for(main, 60)
    assert now() - started <= seconds
    return result


@pytest.mark.parametrize("late_s", [0.9 * TTL_S, 1.5 * TTL_S])
def test_a_lease_that_was_granted_late_is_renewed_at_its_end_and_not_asked_for_without_a_pause(late_s: float) -> None:
    """Sim seed 605: what was certain for less than a third of the time to live was held in a loop without end."""

    async def main() -> None:
        server = MemoryStoreServer(random.Random(0), min_delay_s=0.001, max_delay_s=0.001, watch_delay_s=0.01)
        store = server.client()
        grant = store.grant

        async def granted_late(ttl_s: int) -> int:
            lease_id = await grant(ttl_s)
            store.grant = grant  # type: ignore[method-assign]
            await asyncio.sleep(late_s)
            return lease_id

        store.grant = granted_late  # type: ignore[method-assign]
        election = Election(store, key="/leader", value=b"me", ttl_s=TTL_S)
        election.start()
        await asyncio.sleep(10 * TTL_S)
        assert election.is_leader(now())
        await election.resign()

    run(main(), seed=1, max_events=20_000)


def test_a_session_keeps_its_keys_and_takes_them_away() -> None:
    async def main(server: MemoryStoreServer) -> None:
        session = LeaseSession(server.client(), ttl_s=TTL_S)
        session.start()
        assert not session.is_live(now())
        await session.register("/a", b"1")
        await session.register("/b", b"1")
        assert session.is_live(now())
        await asyncio.sleep(20)
        assert list(server.keys) == ["/a", "/b"]
        await session.register("/a", b"2")
        await session.unregister("/b")
        kv = server.get("/a")
        assert kv is not None
        assert (kv.value, list(server.keys)) == (b"2", ["/a"])
        await session.close()
        assert list(server.keys) == []
        with pytest.raises(RuntimeError, match="closed"):
            await session.register("/a", b"1")

    run_seeds(main)


def test_a_session_waits_for_a_store_that_is_not_there_yet() -> None:
    async def main(server: MemoryStoreServer) -> None:
        server.set_up(False)
        session = LeaseSession(server.client(), ttl_s=TTL_S)
        session.start()
        registering = asyncio.create_task(session.register("/a", b"1"))
        await asyncio.sleep(5)
        assert not registering.done()
        server.set_up(True)
        await within(1.0, registering)
        await session.close()

    run_seeds(main)


def test_a_lost_lease_is_replaced_and_the_keys_put_again() -> None:
    async def main(server: MemoryStoreServer) -> None:
        losses: list[float] = []
        session = LeaseSession(server.client(), ttl_s=TTL_S, on_lost=lambda: losses.append(now()))
        session.start()
        await session.register("/a", b"1")
        server.expire_lease(session.lease_id)
        assert list(server.keys) == []
        await asyncio.sleep(TTL_S)
        assert (list(server.keys), len(losses)) == (["/a"], 1)
        await session.close()

    run_seeds(main)


def test_a_cut_off_session_notices_in_time_and_recovers() -> None:
    async def main(server: MemoryStoreServer) -> None:
        losses: list[float] = []
        client = server.client()
        session = LeaseSession(client, ttl_s=TTL_S, on_lost=lambda: losses.append(now()))
        session.start()
        await session.register("/a", b"1")
        client.set_reachable(False)
        cut_at = now()
        while "/a" in server.keys:
            assert not losses or server.keys
            await asyncio.sleep(0.01)
        assert not session.is_live(now()), "the store has expired a lease that we hold valid"
        await asyncio.sleep(cut_at + 10 - now())
        assert len(losses) == 1
        client.set_reachable(True)
        await asyncio.sleep(3)
        assert list(server.keys) == ["/a"]
        await session.close()

    run_seeds(main)


def test_of_many_candidates_one_leads_and_epochs_grow() -> None:
    async def main(server: MemoryStoreServer) -> None:
        elections = [Election(server.client(), key="/leader", value=bytes([i]), ttl_s=TTL_S) for i in range(4)]
        for election in elections:
            election.start()
        epochs: list[int] = []
        left = list(elections)
        while left:
            await asyncio.sleep(1)
            leaders = [e for e in left if e.is_leader(now())]
            assert len(leaders) == 1
            epochs.append(leaders[0].epoch)
            kv = server.get("/leader")
            assert kv is not None
            assert kv.create_revision == epochs[-1]
            await leaders[0].resign()
            left.remove(leaders[0])
        assert epochs == sorted(set(epochs))
        assert list(server.keys) == []

    run_seeds(main)


async def watch_for_two_leaders(elections: list[Election]) -> None:
    while True:
        leaders = [e.epoch for e in elections if e.is_leader(now())]
        assert len(leaders) <= 1
        await asyncio.sleep(0.01)


def test_never_two_leaders_while_candidates_are_cut_off_and_leases_expire() -> None:
    async def main(server: MemoryStoreServer) -> None:
        rng = random.Random(server.draw_half_delay_s())
        clients: list[MemoryStore] = [server.client() for _ in range(3)]
        elections = [Election(c, key="/leader", value=b"x", ttl_s=TTL_S) for c in clients]
        for election in elections:
            election.start()
        watcher = asyncio.create_task(watch_for_two_leaders(elections))
        for _ in range(12):
            client = rng.choice(clients)
            fault = rng.choice(["cut", "lose", "down", "compact"])
            if fault == "cut":
                client.set_reachable(False)
            elif fault == "lose":
                client.lose_answers(True)
            elif fault == "down":
                server.set_up(False)
            else:
                server.compact()
            await asyncio.sleep(rng.uniform(0.1, 5))
            client.set_reachable(True)
            client.lose_answers(False)
            server.set_up(True)
            await asyncio.sleep(rng.uniform(0.1, 3))
        await asyncio.sleep(2 * TTL_S + 3)
        assert [e.is_leader(now()) for e in elections].count(True) == 1
        assert not watcher.done(), watcher
        watcher.cancel()
        for election in elections:
            await election.resign()
        await asyncio.sleep(2 * TTL_S)  # grants whose answers were lost

    run_seeds(main)


def test_a_failover_takes_little_more_than_the_lease() -> None:
    async def main(server: MemoryStoreServer) -> None:
        first_client, second_client = server.client(), server.client()
        first = Election(first_client, key="/leader", value=b"1", ttl_s=TTL_S)
        second = Election(second_client, key="/leader", value=b"2", ttl_s=TTL_S)
        first.start()
        epoch = await first.elected()
        second.start()
        await asyncio.sleep(5)
        first_client.set_reachable(False)
        assert await within(TTL_S + 0.5, second.elected()) > epoch
        assert first.leads(now())
        assert not first.is_leader(now())
        first.outranked()
        assert not first.leads(now())
        await within(0.1, first.lost(epoch))
        first_client.set_reachable(True)
        await asyncio.sleep(10)
        assert second.is_leader(now())
        assert not first.is_leader(now())
        await second.resign()
        await within(0.5, first.elected())
        await first.resign()

    run_seeds(main)


def test_a_leader_whose_key_is_deleted_stands_down_and_up_again() -> None:
    async def main(server: MemoryStoreServer) -> None:
        election = Election(server.client(), key="/leader", value=b"1", ttl_s=TTL_S)
        election.start()
        epoch = await election.elected()
        await server.client().delete("/leader")
        await within(0.5, election.lost(epoch))
        assert await within(0.5, election.elected()) > epoch
        await election.resign()

    run_seeds(main)


def test_a_store_restart_leaves_the_old_leader_its_term() -> None:
    async def main(server: MemoryStoreServer) -> None:
        election = Election(server.client(), key="/leader", value=b"1", ttl_s=TTL_S)
        election.start()
        epoch = await election.elected()
        server.set_up(False)
        until = now() + 7
        while now() < until:
            assert election.leads(now()), "without a gap"
            await asyncio.sleep(0.003)
        assert not election.is_leader(now())
        server.set_up(True)
        await asyncio.sleep(2.5)
        assert election.is_leader(now())
        assert election.epoch == epoch
        await election.resign()

    run_seeds(main)


def parse_number(kv: KeyValue) -> int:
    return int(kv.value)


def test_a_mirror_follows_through_outage_compaction_and_bad_records() -> None:
    async def main(server: MemoryStoreServer) -> None:
        writer = server.client()
        await writer.put("/n/a", b"1")
        reader = server.client()
        reader.set_reachable(False)
        changes: list[tuple[str, int | None]] = []
        mirror = Mirror(reader, "/n/", parse=parse_number, on_change=lambda *change: changes.append(change))
        mirror.start()
        await asyncio.sleep(5)
        reader.set_reachable(True)
        await within(5, mirror.ready())
        assert mirror.values == {"a": 1}
        await writer.put("/n/b", b"2")
        await writer.put("/n/a", b"not a number")
        await writer.put("/elsewhere", b"3")
        await asyncio.sleep(0.1)
        assert mirror.values == {"b": 2}
        reader.set_reachable(False)
        await writer.delete("/n/b")
        await writer.put("/n/c", b"3")
        await writer.put("/n/a", b"4")
        server.compact()
        await asyncio.sleep(1)
        assert mirror.values == {"b": 2}
        reader.set_reachable(True)
        await asyncio.sleep(0.1)
        assert mirror.values == {"a": 4, "c": 3}
        assert mirror.revision == server.revision
        assert changes == [("a", 1), ("b", 2), ("a", None), ("b", None), ("a", 4), ("c", 3)]
        await mirror.close()

    run_seeds(main)


@pytest.mark.parametrize("is_there_before", [True, False])
def test_a_mirror_goes_on_behind_a_record_that_it_cannot_take(is_there_before: bool) -> None:
    heard: list[tuple[str, int | None]] = []

    def parse(kv: KeyValue) -> int:
        if kv.value == b"deep":
            raise RecursionError
        return int(kv.value)

    def take(key: str, value: int | None) -> None:
        if value == 13:
            raise ZeroDivisionError
        heard.append((key, value))

    async def main() -> None:
        server = MemoryStoreServer()
        writer = server.client()
        mirror = Mirror(server.client(), "/n/", parse=parse, on_change=take)
        if not is_there_before:
            mirror.start()
            await mirror.ready()
        for key, value in {"a": b"13", "b": b"deep", "c": b"3"}.items():
            await writer.put(f"/n/{key}", value)
        if is_there_before:
            mirror.start()
        await asyncio.sleep(1)
        await mirror.ready()
        assert mirror.values == {"c": 3}
        await writer.put("/n/a", b"1")
        await writer.delete("/n/b")
        await asyncio.sleep(1)
        assert mirror.values == {"a": 1, "c": 3}
        assert heard == [("a", None), ("c", 3), ("a", 1)]
        with pytest.raises(ZeroDivisionError):
            await mirror.close()

    run(main(), seed=1)


def test_who_waits_for_a_mirrors_end_hears_why() -> None:
    async def main() -> None:
        store = MemoryStoreServer().client()
        mirror = Mirror(store, "/n/", parse=parse_number)
        mirror.start()
        await mirror.ready()
        failed = asyncio.ensure_future(mirror.failed())
        await asyncio.sleep(1)
        assert not failed.done()
        mirror._replace = None  # type: ignore[assignment, method-assign]
        mirror._apply = None  # type: ignore[assignment, method-assign]
        await store.put("/n/a", b"1")
        with pytest.raises(TypeError):
            await asyncio.wait_for(failed, 60)

    run(main(), seed=1)


def test_a_cut_off_client_waits_and_a_dead_server_answers_at_once() -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        client = server.client()
        client.set_reachable(False)
        with pytest.raises(StoreUnavailable):
            await client.get("/a")
        assert now() == 2.0
        client.set_reachable(True)
        server.set_up(False)
        with pytest.raises(StoreUnavailable):
            await client.get("/a")
        assert now() == 2.0
        server.set_up(True)
        client.lose_answers(True)
        with pytest.raises(StoreUnavailable):
            await client.put("/a", b"1")
        assert list(server.keys) == ["/a"]

    run(main(), seed=1)


def test_leases_stand_still_while_the_server_is_down() -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        client = server.client()
        lease_id = await client.grant(5)
        await client.put("/a", b"1", lease_id=lease_id)
        server.set_up(False)
        await asyncio.sleep(100)
        server.set_up(True)
        await asyncio.sleep(4.9)
        assert list(server.keys) == ["/a"]
        await asyncio.sleep(0.2)
        assert (list(server.keys), list(server.leases)) == ([], [])

    run(main(), seed=1)


def test_a_leader_whose_lease_ran_out_meanwhile_stands_again() -> None:
    async def main(server: MemoryStoreServer) -> None:
        client = server.client()
        election = Election(client, key="/leader", value=b"1", ttl_s=TTL_S)
        election.start()
        epoch = await election.elected()
        client.set_reachable(False)
        await asyncio.sleep(TTL_S + 5)
        assert election.leads(now())
        assert election.epoch == epoch
        client.set_reachable(True)
        await within(3.0, election.lost(epoch))
        assert await within(1.0, election.elected()) > epoch
        await election.resign()

    run_seeds(main)


def test_a_leader_that_stood_still_past_its_lease_does_not_lead_on() -> None:
    """Others may have been elected meanwhile, and obeyed."""

    async def main(server: MemoryStoreServer) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        node = loop.node("one")
        client = server.client()
        election = Election(client, key="/leader", value=b"1", ttl_s=TTL_S)

        async def lead() -> None:
            election.start()
            await election.elected()
            await asyncio.sleep(100)

        node.start(lead())
        await asyncio.sleep(1)
        assert election.leads(now())
        node.pause()
        client.set_reachable(False)
        await asyncio.sleep(TTL_S + 1)
        node.resume()
        until = now() + 5
        while now() < until:
            assert not election.leads(now())
            await asyncio.sleep(0.01)
        await node.kill()

    run_seeds(main)
