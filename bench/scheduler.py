"""What one scheduling decision costs, on one core, without network.

Every case is a backlogged cluster in a steady state, with `depth` requests waiting in every flow: a request ends on a
worker chosen at random, and the worker's report brings the room for the next grant. Two cases a size:

    core     the whole core, as the scheduler runs it. A round is, for `--batch` requests that ended in one report: that
             report with its counters, the grants that follow, a GrantClosed for each request that ended, and a new
             Enqueued for each grant, which keeps the backlog. decisions_per_s counts grants against the time of all
             these events; dispatch_us is the part of the reports per grant (settlement, choice, placement, grant)
    queue    the fair queue alone: select, dispatch, count, settle and push, with as many places as the core's case

Prompts have 1 to 1,000 tokens, every second request an adapter of its tenant's (each tenant has its own), so there are
some 300 distinct needs. Costs vary, so the order of flows never repeats. Deadlines are set: their timers are part of
the cost. Python's cycle collector is frozen after the set-up and seldom runs, as in the service. Times are processor
time of this one process, less what reading the clock costs; a machine that others use makes them longer all the same.

Decisions are made by compiled code where there is some (`make install`), as the service's are, and without it, or with
`--interpreted`, by interpreted code; `compiled` in a line says which.

In the core's case the clock runs while the core takes events in (`Core.apply`), and at no other time: what the bench
does for workers and routers (making reports and requests, their books) is not in it, but for what that leaves of the
processor's caches. In the queue's case the random numbers that it draws are in the time.

Two more cases, which are not about cost and run where they are named:

    overload the real control plane under 1, 3 and 10 times the load that fits, in virtual time (overload_model.py),
             with overload control and without it; goodput_ratio and interactive_ttft_p95_ratio compare a line with the
             line of load 1 of the same kind, over `--repeat` seeds
    mixes    the same over random clusters and mixes, one a seed, `--repeat` of them from `--first-seed` on: at the load
             that just fits, without control (free) and with it (1x), and at three times that (3x)

Prints JSON lines with `--json`, else a table. `growth` of the last line of each case is the cost at the largest size
against the smallest one, `log_growth` what log n would allow.

    python bench/scheduler.py [--json] [--interpreted] [--seconds 3] [--repeat 3] [--flows 100,1000,10000,30000,100000]
        [--workers 1000]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manylora_shared.process import compiled

IS_COMPILED = "--interpreted" not in sys.argv and not compiled.use()
"""Said before what is compiled is imported."""

from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    SendGrant,
    SendPrefetch,
    WorkerJoined,
    WorkerReported,
)
from manylora_scheduler.core.flows import AGING_PER_S, Flows
from manylora_scheduler.core.reports import FlowTokens, Residency, StartedRequest, WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.serving.clock_codec import Legacy, encode
from manylora_shared.composition import uids_of
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.seam import Rank
from manylora_shared.ids import DEFAULT_POOL, AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.process.heap import collect_seldom, collector_paused, freeze_started
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds what stands beside it as well
from bench.overload_model import run
from bench.overload_result import percentile, ttft_of_small, work_of
from bench.overload_scenario import Scenario, random_scenario

SLOTS = 8
BLOCK_SIZE = 16
KV_BLOCKS = 4096
CLASSES = tuple(QosClass)


def flow_keys(num_flows: int) -> list[FlowKey]:
    """Three classes a tenant."""
    return [FlowKey(TenantId(f"tenant-{i // 3}"), CLASSES[i % 3]) for i in range(num_flows)]


def adapter_of(flow: FlowKey, rng: random.Random) -> AdapterUid | None:
    return AdapterUid(f"{flow.tenant_id:0>64}") if rng.random() < 0.5 else None


def _clock_cost_s() -> float:
    """What reading the clock adds to a span between two readings: a system call, that is a twentieth of a decision."""
    spans = sorted(time.process_time() - time.process_time() for _ in range(2_000))
    return -spans[len(spans) // 2]


CLOCK_S = _clock_cost_s()


@dataclass
class Spent:
    """Processor seconds, and grants in them. The clock's own cost is not in them."""

    grants: int = 0
    reports_s: float = 0.0
    others_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.reports_s + self.others_s


@dataclass
class TrueWorker:
    worker_id: WorkerId
    prompt_tokens: dict[FlowKey, int] = field(default_factory=dict)
    """Cumulative, and so is the output. Numbers alone: the world's books are not for the collector to look at."""
    output_tokens: dict[FlowKey, int] = field(default_factory=dict)
    running: deque[QueuedRequest] = field(default_factory=deque)
    granted: list[QueuedRequest] = field(default_factory=list)
    prefetched: list[AdapterUid] = field(default_factory=list)
    adapters: dict[AdapterUid, Residency] = field(default_factory=dict)


class Cluster:
    """A core, and the world that it believes in."""

    def __init__(self, num_flows: int, num_workers: int, depth: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = Core(CoreLimits(max_queued=10_000_000, max_queued_per_tenant=10_000_000))
        self.flows = flow_keys(num_flows)
        self.now = 0.0
        self.next_id = 0
        self.workers = {WorkerId(f"worker-{i:05}"): TrueWorker(WorkerId(f"worker-{i:05}")) for i in range(num_workers)}
        self.names = list(self.workers)
        self.spent = Spent()
        self.routers = [RouterId(f"router-{i}") for i in range(8)]
        for session, router_id in enumerate(self.routers):
            self.core.apply(RouterConnected(router_id, session), 0.0)
        weights = [1, 1, 2, 4, 8]
        for i, flow in enumerate(self.flows[::3]):
            classes = {qos_class: ClassPolicy(weights[(i + j) % 5]) for j, qos_class in enumerate(CLASSES)}
            self.core.apply(PolicyChanged(flow.tenant_id, TenantPolicy(flow.tenant_id, classes)), 0.0)
        for _ in range(depth):
            for flow in self.flows:
                self.core.apply(self.enqueue(flow), 0.0)
        for worker in self.workers.values():
            self.core.apply(WorkerJoined(worker.worker_id, f"{worker.worker_id}:1", "cuda", 8192), 0.0)
            self.receive(self.core.apply(WorkerReported(worker.worker_id, self.report(worker, snapshot=True)), 0.0))
        for worker in self.workers.values():
            self.receive(self.core.apply(WorkerReported(worker.worker_id, self.report(worker)), 0.0))

    def enqueue(self, flow: FlowKey) -> Enqueued:
        router = self.next_id % len(self.routers)
        self.next_id += 1
        request = QueuedRequest(
            request_id=RequestId(f"request-{self.next_id}"),
            router_id=self.routers[router],
            flow=flow,
            prompt_tokens=self.rng.randint(1, 1000),
            max_new_tokens=self.rng.randint(1, 500),
            adapter_uid=adapter_of(flow, self.rng),
            deadline=self.now + 600.0,
        )
        return Enqueued(router, request)

    def report(self, worker: TrueWorker, *, snapshot: bool = False, end: int = 0) -> WorkerReport:
        """What the worker says when `end` of its requests have ended and what it was granted has started."""
        started = tuple(StartedRequest(r.request_id, r.flow, r.sequences) for r in worker.granted)
        granted = [uid for r in worker.granted if r.adapter_uid is not None for uid in uids_of(r.adapter_uid)]
        adapters = {uid: Residency.DEVICE for uid in granted + worker.prefetched if uid not in worker.adapters}
        worker.prefetched = []
        worker.adapters |= adapters
        while len(worker.adapters) > 4 * SLOTS:
            evicted = next(iter(worker.adapters))
            del worker.adapters[evicted]
            adapters[evicted] = Residency.ABSENT
        worker.running.extend(worker.granted)
        worker.granted = []
        ended = [worker.running.popleft() for _ in range(min(end, len(worker.running)))]
        flows = {}
        for request in ended:
            flow = request.flow
            prompt = worker.prompt_tokens[flow] = worker.prompt_tokens.get(flow, 0) + request.prompt_tokens
            more = self.rng.randint(1, request.max_new_tokens)
            output = worker.output_tokens[flow] = worker.output_tokens.get(flow, 0) + more
            flows[flow] = FlowTokens(prompt, output)
        used = sum(-(-(r.prompt_tokens + r.max_new_tokens) // BLOCK_SIZE) for r in worker.running)
        return WorkerReport(
            snapshot=snapshot,
            sequence_slots=SLOTS,
            running_sequences=len(worker.running),
            kv_blocks_total=KV_BLOCKS,
            kv_blocks_free=KV_BLOCKS - used,
            block_size=BLOCK_SIZE,
            adapters=worker.adapters.copy() if snapshot else adapters,
            started=started,
            finished=tuple(r.request_id for r in ended),
            flows=flows,
        )

    def receive(self, commands: list[Command]) -> list[SendGrant]:
        grants = []
        for command in commands:
            if isinstance(command, SendGrant):
                self.workers[command.worker_id].granted.append(command.request)
                grants.append(command)
            elif isinstance(command, SendPrefetch):
                self.workers[command.worker_id].prefetched.append(command.adapter_uid)
        return grants

    def round(self, batch: int) -> None:
        """One worker reports the ends of some requests; everything that follows from it."""
        self.now += 1e-5
        worker = self.workers[self.rng.choice(self.names)]
        ending = list(worker.running)[:batch]
        report = WorkerReported(worker.worker_id, self.report(worker, end=batch))
        before = time.process_time()
        commands = self.core.apply(report, self.now)
        self.spent.reports_s += time.process_time() - before - CLOCK_S
        grants = self.receive(commands)
        events = [
            GrantClosed(self.routers.index(r.router_id), r.router_id, r.request_id, worker.worker_id, True)
            for r in ending
        ] + [self.enqueue(grant.request.flow) for grant in grants]
        commands = []
        before = time.process_time()
        for event in events:
            commands += self.core.apply(event, self.now)
        self.spent.others_s += time.process_time() - before - CLOCK_S
        assert not self.receive(commands), "room was left by the report"
        self.spent.grants += len(grants)

    def snapshot(self) -> dict[str, float]:
        """What keeping the clock costs: in one go, in which nothing is granted, and in all."""
        before = time.process_time()
        with collector_paused():
            snapshot = self.core.clock_snapshot()
        taken = time.process_time()
        size = sum(map(len, encode(Legacy({DEFAULT_POOL: snapshot}, {}))))
        return {
            "snapshot_entries": snapshot.size,
            "snapshot_kb": round(size / 1024, 1),
            "snapshot_ms": round(1000 * (taken - before), 1),
            "snapshot_with_encoding_ms": round(1000 * (time.process_time() - before), 1),
        }


class Contest:
    """The fair queue alone, with the core's flows and costs."""

    def __init__(self, num_flows: int, num_workers: int, depth: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queue: FairQueue[FlowKey, int] = FairQueue(aging_per_s=AGING_PER_S)
        self.shares = Flows()
        self.flows = flow_keys(num_flows)
        self.now_us = 0
        self.next_item = 0
        self.running: deque[tuple[int, FlowKey, int]] = deque()
        self.totals: dict[FlowKey, int] = dict.fromkeys(self.flows, 0)
        self.spent = Spent()
        for _ in range(depth):
            for flow in self.flows:
                self.push(flow)
        for _ in range(num_workers * SLOTS):
            self.start()

    def push(self, flow: FlowKey) -> None:
        self.next_item += 1
        need = (1, self.rng.randint(1, 6), self.next_item % 8)
        rank = Rank(0, self.now_us, self.next_item)
        share = self.shares.share(flow)
        self.queue.push(self.next_item, flow, share=share, need=need, rank=rank, since_us=self.now_us)

    def start(self) -> FlowKey | None:
        pick = self.queue.select(lambda item: item, self.now_us)
        if pick is None:
            return None
        reserve = self.rng.randint(1, 2000)
        self.queue.dispatch(pick, reserve)
        flow: FlowKey = self.queue._items[pick.item].key
        self.running.append((pick.item, flow, reserve))
        return flow

    def round(self, batch: int) -> None:
        self.now_us += 10
        before = time.process_time()
        for _ in range(min(batch, len(self.running))):
            item, flow, reserve = self.running.popleft()
            self.totals[flow] += self.rng.randint(1, reserve)
            self.queue.count("worker", {flow: self.totals[flow]}, self.shares.share)
            self.queue.settle(item)
            started = self.start()
            assert started is not None
            self.push(started)
            self.spent.grants += 1
        self.spent.others_s += time.process_time() - before - CLOCK_S


def measure(world: Cluster | Contest, batch: int, seconds: float, repeat: int) -> dict[str, float]:
    """The best of some runs over one set-up: what else the machine does only ever adds time."""
    freeze_started()
    found: list[Spent] = []
    for _ in range(repeat + 1):
        world.spent = Spent()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(50):
                world.round(batch)
        found.append(world.spent)
    gc.unfreeze()
    rates = [spent.grants / spent.total_s for spent in found[1:]]
    best = found[1:][rates.index(max(rates))]
    what = {
        "decisions_per_s": round(max(rates), 1),
        "decisions_per_s_median": round(sorted(rates)[len(rates) // 2], 1),
        "decision_us": round(1e6 * best.total_s / best.grants, 2),
    }
    if isinstance(world, Cluster):
        what["dispatch_us"] = round(1e6 * best.reports_s / best.grants, 2)
        what["dispatches_per_s"] = round(best.grants / best.reports_s, 1)
        what |= world.snapshot()
    return what


def overload_lines(seeds: int) -> Iterator[dict[str, object]]:
    """One line a load, summed over seeds."""
    for is_on in (True, False):
        base: dict[str, float] = {}
        for load in (1.0, 3.0, 10.0):
            began = time.monotonic()
            runs = [run(Scenario(load=load, overload=is_on, seed=seed)) for seed in range(1, seeds + 1)]
            seconds = Scenario(load).until_s - Scenario(load).measured_from_s
            line: dict[str, object] = {
                "bench": "scheduler",
                "case": "overload",
                "load": load,
                "overload_control": is_on,
            }
            line["goodput_tokens_per_s"] = round(sum(r.good_tokens for r in runs) / seconds / seeds, 1)
            for qos_class in CLASSES:
                name = qos_class.value
                ttft_s = [wait for r in runs for wait in r.ttft_s[qos_class]]
                line[f"{name}_ttft_p95_ms"] = round(1000 * percentile(ttft_s, 0.95), 1)
                for what in ("offered", "completed", "refused", "expired"):
                    line[f"{name}_{what}"] = sum(getattr(r, what)[qos_class] for r in runs)
            for name, ratio in (("goodput_tokens_per_s", "goodput_ratio"), ("interactive_ttft_p95_ms", "")):
                value = float(str(line[name]))
                base.setdefault(name, value)
                line[ratio or "interactive_ttft_p95_ratio"] = round(value / base[name], 3)
            line |= {
                "seeds": seeds,
                "virtual_s": Scenario(load).until_s,
                "took_s": round(time.monotonic() - began, 1),
            }
            yield line


def mix_lines(seeds: range) -> Iterator[dict[str, object]]:
    """One line a seed: a random cluster and mix under the load that just fits, and under three times that."""
    for seed in seeds:
        cases = {
            "free": random_scenario(seed, 1.0, overload=False),
            "one": random_scenario(seed, 1.0),
            "three": random_scenario(seed, 3.0),
        }
        results = {name: run(scenario) for name, scenario in cases.items()}
        p95_ms = {n: 1e3 * percentile(ttft_of_small(cases[n], r), 0.95) for n, r in results.items()}
        work = {n: work_of(cases[n], r) for n, r in results.items()}
        scenario, batch = cases["one"], CLASSES[-1]
        yield {
            "bench": "scheduler",
            "case": "mixes",
            "seed": seed,
            "slots": f"{scenario.workers}x{scenario.slots}",
            "tenants": scenario.tenants,
            "group": scenario.group,
            "large": scenario.large,
            "parts": "/".join(f"{scenario.mix[qos_class].part:.2f}" for qos_class in CLASSES),
            "ttft_p95_ms_free": round(p95_ms["free"], 1),
            "ttft_p95_ms_1x": round(p95_ms["one"], 1),
            "ttft_p95_ms_3x": round(p95_ms["three"], 1),
            "ttft_ratio": round(p95_ms["three"] / p95_ms["one"], 2),
            "work_ratio": round(work["three"] / work["one"], 3),
            "work_ratio_to_free": round(work["three"] / work["free"], 3),
            "batch_refused_at_1x": round(results["one"].refused[batch] / results["one"].offered[batch], 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="What one scheduling decision costs.")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--interpreted", action="store_true", help="by the sources, also where they were compiled")
    parser.add_argument("--repeat", type=int, default=3, help="runs after one to warm up; the best counts")
    parser.add_argument("--flows", default="100,1000,10000,30000,100000", help="numbers of flows")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1, help="requests that end in one report")
    parser.add_argument("--depth", type=int, default=2, help="requests that wait in every flow")
    parser.add_argument("--case", choices=["core", "queue", "both", "overload", "mixes"], default="both")
    parser.add_argument("--first-seed", type=int, default=1, help="of --case mixes, which runs --repeat seeds")
    args = parser.parse_args()
    collect_seldom()  # as the service does
    if args.case == "mixes":
        for mix_line in mix_lines(range(args.first_seed, args.first_seed + args.repeat)):
            show(mix_line, as_json=args.json)
        return
    if args.case == "overload":
        for overload_line in overload_lines(args.repeat):
            show(overload_line, as_json=args.json)
        return
    cases: dict[str, Callable[[int, int, int, int], Cluster | Contest]] = {"core": Cluster, "queue": Contest}
    sizes = [int(size) for size in args.flows.split(",")]
    for case in cases if args.case == "both" else [args.case]:
        costs: dict[int, float] = {}
        for size in sizes:
            # Few flows need a deeper queue, or the workers would run them dry.
            depth = max(args.depth, 2 * args.workers * SLOTS // size)
            load = os.getloadavg()[0]
            world = cases[case](size, args.workers, depth, 1)
            what = measure(world, args.batch, args.seconds, args.repeat)
            del world
            costs[size] = what["decision_us"]
            line: dict[str, object] = {
                "bench": "scheduler",
                "case": case,
                "flows": size,
                "workers": args.workers,
                "compiled": IS_COMPILED,
                **what,
            }
            line |= {"queued_per_flow": depth, "ended_per_report": args.batch, "load_before": round(load, 2)}
            line["rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
            if size == sizes[-1] and len(sizes) > 1:
                line["growth"] = round(costs[size] / costs[sizes[0]], 2)
                line["log_growth"] = round(math.log(size) / math.log(sizes[0]), 2)
            show(line, as_json=args.json)


def show(line: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
    else:
        print("  ".join(f"{name}={value}" for name, value in line.items() if name != "bench"), flush=True)


if __name__ == "__main__":
    main()
