"""What goes wrong, and when, by a seed. A run also draws which kinds of faults it has: some are met alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.ids import QosClass
from manylora_sim.store import MemoryStore

from tests.sim.cluster import LEAVING_ADAPTER, TENANTS, WATCH_DELAY_S, Cluster, Process
from tests.sim.traffic import CLIENT

_LEADER = 0.8
"""How often a fault between a scheduler and others is one of the leader."""
_PICKED_LEADER = 0.2
"""How often a fault of a process is made the leader's."""


class Faults:
    """Injects faults until it is healed. Logs what it did, for the reader of a failing seed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.log: list[str] = []
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/faults")
        self._tasks: list[asyncio.Task[None]] = []
        kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "pause": self._pause,
            "partition": self._partition,
            "reset connections": self._reset_connections,
            "connections clog": self._clog,
            "store down": self._store_down,
            "store cut off": self._store_cut_off,
            "store loses answers": self._store_loses_answers,
            "lease expires": self._lease_expires,
            "history compacted": self._compact,
            "watches lag": self._watches_lag,
            "adapter removed": self._remove_adapter,
            "policy changed": self._policy,
            "memory policy changed": self._memory_policy,
            "what is shared changed": self._cache_group,
            "messages are slow": self._slow_messages,
            "loads are slow": self._slow_loads,
            "wall clock jumps": self._jump,
        }
        chosen = self._rng.sample(list(kinds), self._rng.randint(1, len(kinds)))
        self._kinds = {name: kinds[name] for name in kinds if name in chosen}

    async def run(self, duration_s: float, faults: int) -> None:
        for _ in range(faults):
            await asyncio.sleep(self._rng.expovariate(faults / duration_s))
            name = self._rng.choice(list(self._kinds))
            self._note(name)
            self._tasks.append(asyncio.create_task(self._kinds[name](), name=f"fault {name}"))

    async def heal(self) -> None:
        """Ends everything that is wrong; then all processes are up."""
        cluster = self._cluster
        for process in cluster.processes.values():
            cluster.resume(process)
        cluster.network.heal()
        cluster.store_server.set_up(True)
        for process in cluster.processes.values():
            self._mend_store(process)
        for task in self._tasks:
            await task
        for process in cluster.processes.values():
            cluster.resume(process)
            self._mend_store(process)
        cluster.network.heal()
        cluster.store_server.set_up(True)
        cluster.store_server.watch_delay_s = WATCH_DELAY_S
        cluster.network.set_delays()
        cluster.load_factor = 1.0
        await cluster.all_up()
        self._note("healed")

    def _note(self, what: str) -> None:
        self.log.append(f"{self._cluster.loop.time():8.3f} s  {what}")

    def _pick(self) -> Process | None:
        """A process that is there and that no other fault is changing."""
        found = [p for p in self._cluster.processes.values() if not p.is_down and not p.is_changing]
        process = self._rng.choice(found) if found else None
        if self._rng.random() < _PICKED_LEADER and (leader := self._leader()) in found:
            process = leader
        if process is not None:
            self.log[-1] += f": {process.name}"
        return process

    async def _later(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.05, longest_s))

    async def _kill(self) -> None:
        process = self._pick()
        if process is not None:
            await self._cluster.kill(process, silently=self._rng.random() < 0.3)
            await self._restart(process)

    async def _stop(self) -> None:
        process = self._pick()
        if process is not None:
            self._cluster.resume(process)
            await self._cluster.stop(process)
            await self._restart(process)

    async def _restart(self, process: Process) -> None:
        await self._later(4.0)
        if process.is_down:
            self._cluster.launch(process)

    async def _pause(self) -> None:
        process = self._pick()
        if process is not None:
            self._cluster.pause(process)
            await self._later(4.0)
            self._cluster.resume(process)

    async def _partition(self) -> None:
        one, other = self._pair()
        self._cluster.network.partition(one, other, both_ways=self._rng.random() < 0.5)
        await self._later(5.0)
        if self._rng.random() < 0.5:
            self._cluster.network.drop_connections(one, other)  # and what was held up between them is lost
        self._cluster.network.heal_between(one, other)

    async def _clog(self) -> None:
        """Again and again what one node sends another is held up and then lost with the connection, sooner than anybody
        would miss a ping (FoundationDB's swizzle-clogging)."""
        one, other = self._pair()
        network = self._cluster.network
        for _ in range(self._rng.randint(2, 6)):
            network.partition(one, other, both_ways=False)
            await asyncio.sleep(self._rng.uniform(0.02, 0.4))
            network.drop_connections(one, other)
            network.heal_between(one, other)
            await asyncio.sleep(self._rng.uniform(0.05, 0.8))

    async def _reset_connections(self) -> None:
        self._cluster.network.drop_connections(*self._pair())

    def _pair(self) -> tuple[str, str]:
        """Two nodes that talk to each other."""
        kinds = self._rng.choice(
            [("router", "scheduler"), ("router", "worker"), ("scheduler", "worker"), (CLIENT, "router")]
        )
        one, other = (self._name(kind) for kind in kinds)
        if self._rng.random() < 0.5:
            one, other = other, one
        self.log[-1] += f": {one} {other}"
        return one, other

    def _name(self, kind: str) -> str:
        """A node of a kind. Of schedulers mostly the leader: nobody talks to the others."""
        if kind == "scheduler" and self._rng.random() < _LEADER and (leader := self._leader()) is not None:
            return leader.name
        return self._rng.choice(self._cluster.names(kind) or [kind])

    def _leader(self) -> Process | None:
        leaders = self._cluster.leaders()
        return next((p for p in self._cluster.processes.values() if p.app in leaders), None)

    async def _store_down(self) -> None:
        self._cluster.store_server.set_up(False)
        await self._later(6.0)
        self._cluster.store_server.set_up(True)

    async def _store_cut_off(self) -> None:
        process = self._pick()
        if process is not None and process.store is not None:
            store = process.store
            store.set_reachable(False)
            await self._later(6.0)
            if self._rng.random() < 0.3:
                await self._rng.choice([self._remove_adapter, self._policy])()
            if self._rng.random() < 0.5:
                await self._compact()
            if process.store is store and not process.is_changing and not process.is_down:
                store.set_reachable(True)

    async def _store_loses_answers(self) -> None:
        process = self._pick()
        if process is not None and process.store is not None:
            store = process.store
            store.lose_answers(True)
            await self._later(3.0)
            store.lose_answers(False)

    async def _lease_expires(self) -> None:
        leases = list(self._cluster.store_server.leases)
        if leases and self._cluster.store_server.is_up:
            self._cluster.lease_taken_at = self._cluster.loop.time()
            self._cluster.leases_taken += 1
            self._cluster.store_server.expire_lease(self._rng.choice(leases))

    async def _compact(self) -> None:
        if self._cluster.store_server.is_up:
            self._cluster.store_server.compact()

    async def _watches_lag(self) -> None:
        self._cluster.store_server.watch_delay_s = self._rng.choice([0.1, 1.0])
        await self._later(5.0)
        self._cluster.store_server.watch_delay_s = WATCH_DELAY_S

    async def _remove_adapter(self) -> None:
        """For good; callers that name it afterwards must be told so."""
        tenant = self._rng.choice(list(TENANTS))
        self._cluster.removed_adapters[tenant] = None
        await self._operator(lambda store: store.delete(keys.adapter(tenant, LEAVING_ADAPTER)))

    async def _policy(self) -> None:
        tenant = self._rng.choice(list(TENANTS))
        weight = self._rng.randint(1, 20)
        before = self._cluster.policies[tenant]
        classes = {qos_class: replace(before.classes[qos_class], weight=weight) for qos_class in QosClass}
        policy = replace(before, classes=classes)
        await self._operator(lambda store: self._cluster.put_policy(store, policy))

    async def _memory_policy(self) -> None:
        """A tenant's soft share and reserve, which leave every request room. A hard cap that fell would be passed for a
        while."""
        tenant = self._rng.choice(list(TENANTS))
        before = self._cluster.policies[tenant]
        soft, reserve = self._rng.choice([(None, None), (24, None), (16, 8), (32, 8)])
        policy = replace(before, quotas=replace(before.quotas, kv_hbm_mb=soft, kv_hbm_mb_reserve=reserve))
        await self._operator(lambda store: self._cluster.put_policy(store, policy))

    async def _cache_group(self) -> None:
        """Tenants come into a cache group and share copies of adapters, and others leave both."""
        members = self._rng.choice([(), ("acme", "bolt"), ("acme", "crux"), ("bolt", "crux"), tuple(TENANTS)])
        for tenant in TENANTS:
            group = "friends" if tenant in members else None
            policy = replace(self._cluster.policies[tenant], cache_group=group, share_copies=group is not None)
            await self._operator(lambda store, policy=policy: self._cluster.put_policy(store, policy))

    async def _slow_messages(self) -> None:
        slowest_s = self._rng.choice([0.02, 0.2])
        self._cluster.network.set_delays(slowest_s / 10, slowest_s)
        await self._later(4.0)
        self._cluster.network.set_delays()

    async def _slow_loads(self) -> None:
        self._cluster.load_factor = 20.0
        await self._later(4.0)
        self._cluster.load_factor = 1.0

    async def _jump(self) -> None:
        """Timestamps alone follow the wall clock; nothing that is decided may."""
        self._cluster.clock.jump(self._rng.choice([-86_400.0, -1.0, 3_600.0, 1e8]))

    async def _operator(self, change: Callable[[MemoryStore], Coroutine[Any, Any, object]]) -> None:
        """Someone changes the configuration, however long it takes."""
        store = self._cluster.store_server.client()
        while True:
            try:
                await change(store)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.2)
        await store.close()

    def _mend_store(self, process: Process) -> None:
        if process.store is not None and not process.is_down and not process.is_changing:
            process.store.set_reachable(True)
            process.store.lose_answers(False)
