"""The model of etcd against a plain dict: any sequence of operations, any grouping in transactions."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.coordination.base import Compare, Delete, EventKind, Put
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer

KEYS = st.sampled_from(["/a", "/a/1", "/a/2", "/b"])
CHANGES = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=2), st.sampled_from([0, 1, 2])),
    st.builds(Delete, KEYS),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("txn"), st.booleans(), st.lists(CHANGES, max_size=4, unique_by=lambda change: change.key)),
        st.tuples(st.just("expire"), st.sampled_from([1, 2]), st.just([])),
        st.tuples(st.just("compact"), st.just(0), st.just([])),
    ),
    max_size=20,
)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_the_model_is_a_dict_with_history(steps: list[tuple[str, int, list[Put | Delete]]], seed: int) -> None:
    async def main() -> None:
        server = MemoryStoreServer(watch_delay_s=0.01)
        client, watcher = server.client(), server.client()
        leases = {1: await client.grant(1000), 2: await client.grant(1000)}
        truth: dict[str, tuple[bytes, int]] = {}
        mirrored: dict[str, bytes] = {}

        async def follow() -> None:
            last = server.revision
            async with aclosing(watcher.watch("/a", start_revision=last + 1)) as batches:
                async for batch in batches:
                    assert batch.revision > last or batch.reset
                    last = batch.revision
                    if batch.reset:
                        mirrored.clear()
                    for event in batch.events:
                        if event.kind is EventKind.PUT:
                            mirrored[event.kv.key] = event.kv.value
                        else:
                            del mirrored[event.kv.key]

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
        for kind, argument, changes in steps:
            before = server.revision
            if kind == "compact":
                server.compact()
            elif kind == "expire":
                if leases[argument] in server.leases:
                    server.expire_lease(leases[argument])
                    leases[argument] = await client.grant(1000)
                truth = {key: value for key, value in truth.items() if value[1] != argument}
            else:
                kv = server.get("/a")
                holds = Compare("/a", kv.mod_revision if kv is not None else 0)
                compare = holds if argument else Compare("/a", before + 7)
                operations = [
                    Put(c.key, c.value, leases.get(c.lease_id, 0)) if isinstance(c, Put) else c for c in changes
                ]
                result = await client.txn([compare], operations)
                assert result.succeeded == bool(argument)
                if result.succeeded:
                    for change in changes:
                        if isinstance(change, Put):
                            truth[change.key] = (change.value, change.lease_id)
                        else:
                            truth.pop(change.key, None)
            assert server.revision - before in (0, 1)
            listing = await client.list("/")
            assert {kv.key: kv.value for kv in listing.kvs} == {key: value for key, (value, _) in truth.items()}
            assert [kv.key for kv in listing.kvs] == sorted(truth)
        await asyncio.sleep(1)
        assert not following.done(), following
        assert mirrored == {key: value for key, (value, _) in truth.items() if key.startswith("/a")}
        following.cancel()

    run(main(), seed=seed)
