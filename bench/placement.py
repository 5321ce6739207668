"""Where requests with adapters run, over a day whose popular adapters change: the scheduler's own core with one rule of
placement after the other, in virtual time.

    manylora     core/placement.py
    nearest      its rule until November 2026: the least loaded holder under the bounded load, else the first in the
                 adapter's own order (a ring)
    bounded      consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): the ring alone
    round-robin  the next open worker
    random       any open worker

What is real: the core (fair queue, fleet, grants). What is modelled: callers (Poisson arrivals; adapters by Zipf's law,
of whose places a part is shuffled every hour), and workers: `--slots` sequences; adapters on the device by least recent
use, within its bytes; a load takes its bytes over the link, one after the other; a step takes the longer, the more run
and the higher their greatest rank is. An hour has `--hour-s` seconds.

Prints JSON lines, one a rule and seed: loads of adapters (and as a part of requests), TTFT, mean step, how many
(adapter, worker) pairs were held at the end, and what is moved then by the loss of the worker with the most adapters:
adapters whose next request goes elsewhere, and how many it had.

    python bench/placement.py [--workers 16] [--adapters 600] [--load 0.7] [--seeds 3] [--hour-s 20]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from manylora_scheduler.core import dispatch
from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import (
    Enqueued,
    RouterConnected,
    SendGrant,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.placement import choose, in_order, load_cap
from manylora_scheduler.core.reports import Residency, StartedRequest, WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.worker_view import WorkerView
from manylora_shared.ids import AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId

Allowed = Callable[[WorkerView], bool]
Choose = Callable[[QueuedRequest, Fleet, Allowed], WorkerView | None]

ROUTER = RouterId("router")
RANKS = ((8, 0.6), (16, 0.25), (64, 0.15))
RANK_BYTES = 2 << 20  # a rank's, of an adapter of an 8B model
LINK_BYTES_PER_S = 4e9
DEVICE_BYTES = 40 * 16 * RANK_BYTES
PREFILL_S = 0.03
STEP_S = 0.01
RANK_STEP = 0.5  # by how much a step is longer with rank 64 in it
BATCH_STEP = 0.5  # and with all slots taken
TOKENS = (20, 180)
SHUFFLED_PART = 0.1  # of the places, each hour
HOURS = 24


@dataclass
class Machine:
    """A worker: what it runs, and what its device holds."""

    worker_id: WorkerId
    slots: int
    running: dict[RequestId, int] = field(default_factory=dict)  # ranks
    device: OrderedDict[AdapterUid, int] = field(default_factory=OrderedDict)  # bytes, the least recent first
    used: dict[AdapterUid, int] = field(default_factory=dict)  # by how many that run
    link_free_at: float = 0.0

    def load(self, uid: AdapterUid, size: int, now: float) -> tuple[float, dict[AdapterUid, Residency]]:
        """When it is there, and what changed on the device."""
        if uid in self.device:
            self.device.move_to_end(uid)
            return now, {}
        changed: dict[AdapterUid, Residency] = {}
        while sum(self.device.values()) + size > DEVICE_BYTES:
            victim = next((each for each in self.device if not self.used.get(each)), None)
            if victim is None:
                break
            del self.device[victim]
            changed[victim] = Residency.ABSENT
        self.device[uid] = size
        changed[uid] = Residency.DEVICE
        self.link_free_at = max(now, self.link_free_at) + size / LINK_BYTES_PER_S
        return self.link_free_at, changed


class Day:
    def __init__(self, rule: str, seed: int, options: argparse.Namespace) -> None:
        self.options = options
        self.rng = random.Random(seed)
        self.core = Core()
        self.machines = {
            WorkerId(f"w{i:03}"): Machine(WorkerId(f"w{i:03}"), options.slots) for i in range(options.workers)
        }
        self.ranks = {self.uid(i): self._rank() for i in range(options.adapters)}
        self.places = list(self.ranks)  # the most popular first
        self.rng.shuffle(self.places)
        weights = [1.0 / (place + 1) for place in range(len(self.places))]
        self.cumulative = list(itertools.accumulate(weights))
        self.rule = Rules(random.Random(seed)).rules()[rule]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.came: dict[RequestId, tuple[float, int]] = {}
        self.ttft: list[float] = []
        self.steps: list[float] = []
        self.loads = self.requests = 0
        self.ended_at = 0.0

    @staticmethod
    def uid(index: int) -> AdapterUid:
        return AdapterUid(f"{index:064x}")

    def _rank(self) -> int:
        return self.rng.choices([rank for rank, _ in RANKS], [part for _, part in RANKS])[0]

    def run(self) -> dict[str, float | int]:
        before = vars(dispatch)["choose"]
        vars(dispatch)["choose"] = self.rule  # the core asks it as it would ask its own
        try:
            self.core.apply(RouterConnected(ROUTER, 1), 0.0)
            for machine in self.machines.values():
                self.core.apply(WorkerJoined(machine.worker_id, f"{machine.worker_id}:1", "cuda", 8192), 0.0)
                self._report(machine, 0.0, snapshot=True)
            for hour in range(1, HOURS):
                self._at(hour * self.options.hour_s, self._move)
            self._at(0.0, self._arrive)
            while self.events:
                self.ended_at, _, happens = heapq.heappop(self.events)
                happens(self.ended_at)
        finally:
            vars(dispatch)["choose"] = before
        self.ttft.sort()
        return {
            "requests": self.requests,
            "loads": self.loads,
            "loads_part": round(self.loads / self.requests, 4),
            "ttft_p50_ms": round(1e3 * self._percentile(0.5), 1),
            "ttft_p99_ms": round(1e3 * self._percentile(0.99), 1),
            "step_ms": round(1e3 * sum(self.steps) / len(self.steps), 3),
            "held": sum(len(machine.device) for machine in self.machines.values()),
            **self._lose_one(),
        }

    def _lose_one(self) -> dict[str, int]:
        lost = max(self.machines.values(), key=lambda machine: len(machine.device))
        before = self._places()
        self.core.apply(WorkerLeft(lost.worker_id), self.ended_at)
        after = self._places()
        return {"moved": sum(before[uid] != after[uid] for uid in before), "lost_had": len(lost.device)}

    def _places(self) -> dict[AdapterUid, WorkerId]:
        """Where the next request of each adapter that is on a device would run, were it alone."""
        found = {}
        for uid in dict.fromkeys(uid for machine in self.machines.values() for uid in machine.device):
            request_id, flow = RequestId(f"asks {uid}"), FlowKey(TenantId("t0"), QosClass.STANDARD)
            request = QueuedRequest(request_id, ROUTER, flow, 200, 1, adapter_uid=uid, adapter_rank=self.ranks[uid])
            worker = self.rule(request, self.core._fleet, lambda _: True)
            assert worker is not None, "nothing runs"
            found[uid] = worker.worker_id
        return found

    def _percentile(self, part: float) -> float:
        return self.ttft[min(len(self.ttft) - 1, int(part * len(self.ttft)))]

    def _at(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (at, next(self.order), happens))

    def _move(self, now: float) -> None:
        """Some of the popular change their places with any others."""
        count = int(SHUFFLED_PART * len(self.places))
        chosen = self.rng.sample(range(len(self.places)), count) + list(range(0, 10, 3))
        moved = [self.places[i] for i in chosen]
        self.rng.shuffle(moved)
        left = dict.fromkeys(moved)
        for i, uid in zip(chosen, left, strict=False):
            self.places[i] = uid
        self.places = list(dict.fromkeys([*self.places, *self.ranks]))

    def _arrive(self, now: float) -> None:
        options = self.options
        mean_s = PREFILL_S + sum(TOKENS) / 2 * STEP_S * (1 + RANK_STEP / 2 + BATCH_STEP / 2)
        rate = options.load * options.workers * options.slots / mean_s
        if now < HOURS * options.hour_s:
            self._at(now + self.rng.expovariate(rate), self._arrive)
        place = self.rng.choices(range(len(self.places)), cum_weights=self.cumulative[: len(self.places)])[0]
        uid = self.places[place]
        request_id = RequestId(f"r{self.requests}")
        self.requests += 1
        tokens = self.rng.randint(*TOKENS)
        self.came[request_id] = (now, tokens)
        tenant = TenantId(f"t{int(uid, 16) % 40}")
        flow, rank = FlowKey(tenant, QosClass.STANDARD), self.ranks[uid]
        request = QueuedRequest(request_id, ROUTER, flow, 200, tokens, adapter_uid=uid, adapter_rank=rank)
        self._take(self.core.apply(Enqueued(1, request), now), now)

    def _take(self, commands: Iterable[object], now: float) -> None:
        for command in commands:
            if isinstance(command, SendGrant):
                self._begin(command, now)

    def _begin(self, grant: SendGrant, now: float) -> None:
        machine, request = self.machines[grant.worker_id], grant.request
        uid = AdapterUid(str(request.adapter_uid))
        rank = self.ranks[uid]
        had = uid in machine.device
        ready_at, changed = machine.load(uid, rank * RANK_BYTES, now)
        self.loads += not had
        machine.running[request.request_id] = rank
        machine.used[uid] = machine.used.get(uid, 0) + 1
        filled = len(machine.running) / machine.slots
        step = STEP_S * (1 + RANK_STEP * max(machine.running.values()) / 64 + BATCH_STEP * filled)
        came_at, tokens = self.came.pop(request.request_id)
        self.ttft.append(ready_at + PREFILL_S + step - came_at)
        self.steps.append(step)
        started = (StartedRequest(request.request_id, request.flow, 1),)
        self._report(machine, now, started=started, adapters=changed)
        self._at(ready_at + PREFILL_S + tokens * step, lambda at: self._end(machine, request, uid, at))

    def _end(self, machine: Machine, request: QueuedRequest, uid: AdapterUid, now: float) -> None:
        del machine.running[request.request_id]
        machine.used[uid] -= 1
        self._report(machine, now, finished=(request.request_id,))

    def _report(
        self,
        machine: Machine,
        now: float,
        *,
        snapshot: bool = False,
        started: tuple[StartedRequest, ...] = (),
        finished: tuple[RequestId, ...] = (),
        adapters: dict[AdapterUid, Residency] | None = None,
    ) -> None:
        told = WorkerReport(
            snapshot=snapshot,
            sequence_slots=machine.slots,
            running_sequences=len(machine.running),
            kv_blocks_total=100_000,
            kv_blocks_free=100_000,
            block_size=16,
            started=started,
            finished=finished,
            adapters=adapters or {},
        )
        self._take(self.core.apply(WorkerReported(machine.worker_id, told), now), now)


class Rules:
    """`choose` of placement.py, and what takes its place."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = 0

    def rules(self) -> dict[str, Choose]:
        return {
            "manylora": choose,
            "nearest": self.nearest,
            "bounded": self.bounded,
            "round-robin": self.round_robin,
            "random": self.any,
        }

    def _open(self, request: QueuedRequest, fleet: Fleet, allowed: Allowed) -> list[WorkerView]:
        found = [worker for worker in fleet.open_workers() if worker.can_take(request) and allowed(worker)]
        return sorted(found, key=lambda worker: worker.worker_id)

    def any(self, request: QueuedRequest, fleet: Fleet, allowed: Allowed) -> WorkerView | None:
        found = self._open(request, fleet, allowed)
        return self._rng.choice(found) if found else None

    def round_robin(self, request: QueuedRequest, fleet: Fleet, allowed: Allowed) -> WorkerView | None:
        found = self._open(request, fleet, allowed)
        self._next += 1
        return found[self._next % len(found)] if found else None

    def bounded(self, request: QueuedRequest, fleet: Fleet, allowed: Allowed) -> WorkerView | None:
        if not fleet.num_open:
            return None
        cap, uid = load_cap(fleet), AdapterUid(str(request.adapter_uid))

        def accepts(worker: WorkerView) -> bool:
            return worker.slotted_sequences < cap and worker.serving and worker.can_take(request) and allowed(worker)

        return next(in_order(uid, fleet, accepts), None) or next(iter(self._open(request, fleet, allowed)), None)

    def nearest(self, request: QueuedRequest, fleet: Fleet, allowed: Allowed) -> WorkerView | None:
        if not fleet.num_open:
            return None
        uid, cap = AdapterUid(str(request.adapter_uid)), load_cap(fleet)

        def accepts(worker: WorkerView) -> bool:
            most = min(worker.sequence_slots, max(cap, worker.sequence_slots // 4))
            return worker.slotted_sequences < most and worker.serving and worker.can_take(request) and allowed(worker)

        holders = [worker for worker in fleet.holders.of(uid) if accepts(worker)]
        if holders:
            return min(holders, key=lambda worker: (-worker.nearness(uid), worker.slotted_sequences, worker.worker_id))
        return next(in_order(uid, fleet, accepts), None) or next(iter(self._open(request, fleet, allowed)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=600)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hour-s", type=float, default=20.0)
    parser.add_argument("--rules", default="manylora,nearest,bounded,round-robin,random")
    options = parser.parse_args()
    for rule in options.rules.split(","):
        for seed in range(options.seeds):
            found = Day(rule, seed, options).run()
            told = {"bench": "placement", "workers": options.workers, "rule": rule, "seed": seed, **found}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
