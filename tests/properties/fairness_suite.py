"""What any Fairness must hold, as checks that take a class: run on the fast one, the reference, and mutants of both.

What only the fast one has (boosts, needs, counters, succession) is left out where `plain`. The harness knows by itself
what was queued, dispatched, worked and reported. After every action it measures, for each two flows, how far apart
their work came in the interval in which both could be started throughout, and holds that to the formula of
docs/decisions/0008. With `strict` it also recomputes every choice, tag and clock by brute force.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.queue_succession import Snapshot, restore, resume, take_snapshot
from manylora_shared.fairness.seam import TAG_SCALE, Rank, Share

Queue = Any
"""A FairQueue, or a ReferenceQueue where `plain`."""
QueueClass = Callable[..., Queue]

US_PER_S = 1_000_000


@dataclass(eq=False)
class Job:
    item: int
    flow: str
    need: int
    reserve: int
    actual: int
    rank: Rank
    since_us: int
    urgent_us: int | None
    source: str
    done: int = 0
    counted: int = 0


@dataclass
class Books:
    """What the harness knows of one flow by itself."""

    share: Share
    queued: list[Job] = field(default_factory=list)
    """In order of rank."""
    running: list[Job] = field(default_factory=list)
    worked: int = 0
    max_reserve: int = 0
    max_reserved: int = 0
    max_beyond: int = 0
    span: int | None = None
    """Grows whenever an interval in which the flow could be started throughout begins; None: it is not backlogged."""
    denied: bool = False
    backlogged_at: int = 0
    drift: int | None = None
    served_us: int = 0
    """When something of it was dispatched last."""
    error: int = 0
    """By how much leader changes have moved its tag, and what its weights before allowed more, in tag units."""
    reweighed_at: int = -1
    inverse: int = field(init=False)

    def __post_init__(self) -> None:
        self.inverse = TAG_SCALE // self.share.weight

    @property
    def margin(self) -> int:
        """The flow's part of the bound, in tag units."""
        return (self.max_reserved + self.lead) * self.inverse + self.error

    @property
    def lead(self) -> int:
        """The cost by which the flow's tag may be ahead."""
        return self.max_reserve + self.share.cap + self.max_beyond


@dataclass
class Span:
    """One interval of two flows."""

    key: tuple[int, int]
    least: int
    most: int
    lag: int


class Harness:
    """Runs jobs of known cost through a queue, with `slots` places to run in, and checks after every action.

    Work is settled either by each job's own cost when it ends (`counters=False`, as a worker settles its quanta; a
    reservation is never too small then), or by the cumulative counters of three sources that report when they like.
    """

    def __init__(
        self,
        make: QueueClass,
        shares: dict[str, Share],
        slots: int,
        *,
        counters: bool = False,
        aging_per_s: int = 0,
        strict: bool = True,
        plain: bool = False,
    ) -> None:
        self.make = make
        self.aging_per_s = aging_per_s
        self.plain = plain
        self.queue = make() if plain else make(aging_per_s=aging_per_s)
        self.books = {flow: Books(share) for flow, share in shares.items()}
        self.slots = slots
        self.free = slots
        self.counters = counters
        self.strict = strict
        self.now_us = 0
        self.running: list[Job] = []
        self.jobs: dict[int, Job] = {}
        self.dispatched: list[int] = []
        self.seen: list[tuple[int, ...]] = []
        """The clock and all tags after each action."""
        self.worst = 0.0
        """The largest spread seen, as a share of its bound."""
        self.totals: dict[str, dict[str, int]] = {}
        """What each source has really counted."""
        self.saved: tuple[int, Snapshot[str, int]] | None = None
        self.clock_error = 0
        self._spans: dict[tuple[str, str], Span] = {}
        self._clock = 0
        self._tick = 0
        self._next_item = 0

    def share_of(self, flow: str) -> Share:
        return self.books[flow].share

    # ---- what happens

    def arrive(
        self, flow: str, *, actual: int, reserve: int, need: int = 1, priority: int = 0, urgent_in_us: int | None = None
    ) -> int:
        item = self._next_item
        self._next_item += 1
        urgent_us = None if urgent_in_us is None else self.now_us + urgent_in_us
        rank = Rank(-priority, urgent_us or self.now_us, item)
        source = f"source{item % 3}"
        job = self.jobs[item] = Job(item, flow, need, reserve, actual, rank, self.now_us, urgent_us, source)
        book = self.books[flow]
        if not book.queued:
            self._tick += 1
            book.span, book.denied, book.backlogged_at, book.drift = self._tick, False, self._tick, None
        self._push(job)
        if self.strict and len(book.queued) == 1:
            assert self.queue.tag_of(flow) >= self.queue.virtual_time, "a flow must not come back with saved credit"
        self._check()
        return item

    def _push(self, job: Job) -> None:
        bisect.insort(self.books[job.flow].queued, job, key=lambda job: job.rank)
        self.queue.push(
            job.item,
            job.flow,
            share=self.share_of(job.flow),
            rank=job.rank,
            **({} if self.plain else {"need": job.need, "since_us": job.since_us, "urgent_us": job.urgent_us}),
        )

    def dispatch(self) -> None:
        """Starts all that can be started."""
        while self.free:
            heads = self._heads()
            expected = self._expected(heads) if self.strict else None
            before = self.queue.virtual_time
            now = () if self.plain else (self.now_us,)
            pick = self.queue.select(lambda item: True if self.jobs[item].need <= self.free else None, *now)
            if pick is None:
                assert all(job.need > self.free for job in heads.values()), "room is left, and work for it"
                return
            job = self.jobs[pick.item]
            for flow, head in heads.items():
                if head.need > self.free:
                    self._tick += 1
                    self.books[flow].span, self.books[flow].denied = self._tick, True
            self.queue.dispatch(pick, job.reserve)
            if expected is not None:
                floor = min(tag for _, _, tag, head in expected if head.need <= self.free)
                fitting = [head.item for _, _, _, head in expected if head.need <= self.free]
                assert pick.item == fitting[0], "not the least boosted tag"
                assert self.queue.virtual_time == max(before, floor), "the clock is not the un-boosted minimum"
                passed = expected[0][3].item if expected[0][3].need > self.free else None
                assert pick.passed_over == passed
            self.books[job.flow].served_us = self.now_us
            self._dequeue(job)
            self.free -= job.need
            self.running.append(job)
            self.dispatched.append(job.item)
            book = self.books[job.flow]
            book.running.append(job)
            book.max_reserve = max(book.max_reserve, job.reserve)
            self._check()

    def _dequeue(self, job: Job) -> None:
        book = self.books[job.flow]
        book.queued.remove(job)
        if not book.queued:
            book.span = None

    def work(self, job: Job, amount: int) -> None:
        amount = min(amount, job.actual - job.done)
        job.done += amount
        self.books[job.flow].worked += amount
        if self.counters:
            totals = self.totals.setdefault(job.source, {})
            totals[job.flow] = totals.get(job.flow, 0) + amount
        self._check()

    def report(self, source: str) -> None:
        """The source's counters arrive."""
        totals = self.totals.get(source, {})
        reserved = {flow: self.queue.reserved_by(flow) for flow in self.books}
        grown = dict(self.queue.count(source, totals, self.share_of))
        for flow, cost in grown.items():
            assert self.queue.reserved_by(flow) == max(0, reserved[flow] - cost), "a charge must eat reservations first"
            live = [job for job in self.books[flow].running if job.source == source]
            assert cost == sum(job.done - job.counted for job in live), "counted other than what was done"
        assert not self.queue.count(source, totals, self.share_of), "a repeated report counts nothing"
        for job in self.running:
            if job.source == source:
                job.counted = job.done
        self._check()

    def end(self, job: Job) -> None:
        """Ends a job, finished or not."""
        if self.counters:
            self.report(job.source)
        self.running.remove(job)
        self.books[job.flow].running.remove(job)
        self.free += job.need
        del self.jobs[job.item]
        self.queue.settle(job.item, 0 if self.counters else job.done)
        self._check()

    def withdraw(self, item: int) -> None:
        job = self.jobs.pop(item)
        self.queue.remove(item)
        self._dequeue(job)
        self._check()

    def reweigh(self, flow: str, weight: int) -> None:
        """The flow has another weight from now on. Its tag stays: it may be as far ahead as the weight before allowed,
        and what it has reserved by then and does not use is given back by the new weight."""
        book, tag = self.books[flow], self.queue.tag_of(flow)
        before, reserved = book.inverse, self.queue.reserved_by(flow)
        book.share = book.share._replace(weight=weight)
        book.inverse = TAG_SCALE // weight
        self.queue.set_share(flow, book.share)
        assert self.queue.tag_of(flow) == tag, "a change of weight moved a tag"
        book.error += book.lead * max(0, before - book.inverse) + reserved * abs(before - book.inverse)
        book.drift = None
        self._tick += 1
        book.reweighed_at = self._tick
        if book.span is not None:
            book.span = self._tick
        self._check()

    def forgo(self, flow: str) -> None:
        """The flow has no claim to what it was denied until now."""
        book = self.books[flow]
        self.queue.forgo(flow)
        assert self.queue.tag_of(flow) >= self.queue.virtual_time, "credit was kept"
        self._tick += 1
        book.drift = None
        if book.span is not None:
            book.span, book.denied = self._tick, False
        self._check()

    def save(self) -> None:
        """The leader keeps a snapshot."""
        self._tick += 1
        self.saved = (self._tick, take_snapshot(self.queue))

    def succeed(self) -> None:
        """A new leader takes over from the snapshot that was kept last, the sources' counters, and what is queued."""
        assert self.counters
        if self.saved is None:
            return
        saved_at, snapshot = self.saved
        for source in self.totals:
            self.report(source)
        old = self.queue
        new = self.queue = self.make(aging_per_s=self.aging_per_s)
        restore(new, snapshot)
        left = {item: cost for item, _, cost in snapshot.reserved}
        for job in self.running:
            new.adopt(job.item, job.flow, share=self.share_of(job.flow), reserve=left.get(job.item, 0))
        for source, totals in self.totals.items():
            new.count(source, totals, self.share_of)
        for book in self.books.values():
            book.queued.clear()
            book.served_us = 0
        for job in self.jobs.values():
            if job not in self.running:
                self._push(job)
        resume(new)
        new.check_invariants()
        for flow, book in self.books.items():
            if book.queued and max(book.backlogged_at, book.reweighed_at) <= saved_at:
                settled = [queue.tag_of(flow) - queue.reserved_by(flow) * book.inverse for queue in (old, new)]
                assert settled[0] == settled[1], "a flow that was backlogged all the time has another tag"
            book.error += abs(new.tag_of(flow) - old.tag_of(flow))
            book.drift = None
        self.clock_error += abs(new.virtual_time - old.virtual_time)
        self._clock = min(self._clock, new.virtual_time)
        self.saved = None
        self._check()

    # ---- what must hold

    def _heads(self) -> dict[str, Job]:
        """The first queued job of each flow."""
        return {flow: book.queued[0] for flow, book in self.books.items() if book.queued}

    def _expected(self, heads: dict[str, Job]) -> list[tuple[int, int, int, Job]]:
        """(boosted tag, the flow's order, tag, first job) in the order in which flows are to be chosen."""
        rate = self.aging_per_s * TAG_SCALE // US_PER_S
        found = []
        for flow, job in heads.items():
            book = self.books[flow]
            boost = book.share.base * book.inverse + rate * (self.now_us - max(job.since_us, book.served_us))
            cap = book.share.cap * book.inverse
            if job.urgent_us is not None and self.now_us >= job.urgent_us:
                boost = cap
            tag = self.queue.tag_of(flow)
            found.append((tag - min(cap, boost), self.queue.books[flow].order, tag, job))
        return sorted(found, key=lambda entry: entry[:2])

    def _check(self) -> None:
        self._tick += 1
        assert self.queue.virtual_time >= self._clock, "the clock fell"
        self._clock = self.queue.virtual_time
        self.seen.append((self._clock, *map(self.queue.tag_of, self.books)))
        for flow, book in self.books.items():
            reserved = self.queue.reserved_by(flow)
            could_be_reserved = to_count = uncounted = 0
            for job in book.running:
                could_be_reserved += job.reserve
                to_count += job.actual - job.counted
                uncounted += job.done - job.counted
            assert 0 <= reserved <= could_be_reserved, "reservations of ended work are left"
            book.max_reserved = max(book.max_reserved, reserved)
            if self.counters:
                book.max_beyond = max(book.max_beyond, to_count - reserved)
            if self.strict and book.queued:
                drift = self.queue.tag_of(flow) - (book.worked - uncounted + reserved) * book.inverse
                assert book.drift in (None, drift), "a tag moved by other than charges and reservations"
                book.drift = drift
        backlogged = [(flow, book, book.margin) for flow, book in self.books.items() if book.span is not None]
        for (one, f, f_margin), (other, g, g_margin) in itertools.combinations(backlogged, 2):
            span = self._span_of(one, f, other, g)
            spread = span.most - span.least
            bound = f_margin + g_margin + span.lag + self.clock_error
            if spread:
                self.worst = max(self.worst, spread / bound if bound else float("inf"))
            assert spread <= bound, f"{one} and {other} are {spread} apart, bound {bound}"

    def _span_of(self, one: str, f: Books, other: str, g: Books) -> Span:
        """The interval of two backlogged flows, with their lead as it is now."""
        assert f.span is not None
        assert g.span is not None
        key = (f.span, g.span)
        lead = f.worked * f.inverse - g.worked * g.inverse
        span = self._spans.get((one, other))
        if span is None or span.key != key:
            lags = [max(0, self._clock - self.queue.tag_of(x)) for x in (one, other) if self.books[x].denied]
            span = self._spans[one, other] = Span(key, lead, lead, sum(lags))
        elif lead < span.least:
            span.least = lead
        elif lead > span.most:
            span.most = lead
        return span


def _share(rng: random.Random, boosts: bool) -> Share:
    cap = rng.choice([0, 10, 50, 200]) if boosts else 0
    return Share(rng.choice([1, 1, 2, 4, 7]), rng.choice([0, 0, cap // 2, cap]), cap)


def random_schedule(
    make: QueueClass,
    seed: int,
    num_actions: int = 100,
    *,
    strict: bool = True,
    reweighs: bool = False,
    plain: bool = False,
) -> Harness:
    """One random run; raises AssertionError where a property fails. With `reweighs` weights change under way."""
    rng = random.Random(seed)
    counters = rng.random() < 0.5 and not plain
    boosts = rng.random() < 0.6 and not plain
    shares = {f"flow{i}": _share(rng, boosts) for i in range(rng.randint(2, 4))}
    aging_per_s = rng.choice([0, 10, 1000]) if boosts else 0
    slots = rng.randint(1, 6)
    harness = Harness(make, shares, slots, counters=counters, aging_per_s=aging_per_s, strict=strict, plain=plain)
    big = rng.random() < 0.3
    exact = rng.random() < 0.3
    asleep = {flow: rng.randrange(num_actions) if rng.random() < 0.4 else 0 for flow in shares}
    """The action from which on a flow's requests come."""
    bursts = rng.choice([[1, 1, 2, 8], [4, 20]])
    for at in range(num_actions):
        harness.now_us += rng.choice([0, 100, 10_000, 300_000])
        if reweighs and rng.random() < 0.1:
            harness.reweigh(rng.choice(list(shares)), rng.choice([1, 1, 2, 4, 7]))
        if plain and rng.random() < 0.05:
            harness.forgo(rng.choice(list(shares)))
        action = rng.random()
        if action < 0.4:
            actual = rng.choice([0, 1, 5, 20, 100])
            reserve = actual if exact else rng.choice([0, 1, 10, 50, 200])
            if not counters:
                reserve = max(reserve, actual)
            need = 2 if big and harness.slots > 1 and rng.random() < 0.3 else 1
            flow = rng.choice([flow for flow in shares if asleep[flow] <= at] or list(shares))
            urgent = rng.choice([None, None, 0, 200_000]) if boosts else None
            for _ in range(rng.choice(bursts)):
                priority = rng.choice([0, 0, 1])
                harness.arrive(flow, actual=actual, reserve=reserve, need=need, priority=priority, urgent_in_us=urgent)
        elif action < 0.7 and harness.running:
            harness.work(rng.choice(harness.running), rng.choice([1, 3, 10, 40]))
            if counters and rng.random() < 0.5:
                harness.report(f"source{rng.randrange(3)}")
        elif action < 0.92 and harness.running:
            job = rng.choice(harness.running)
            if rng.random() < 0.8:
                harness.work(job, job.actual)
            harness.end(job)
        elif action < 0.95 and counters:
            harness.save()
        elif action < 0.96 and counters:
            harness.succeed()
        else:
            waiting = [item for item, job in harness.jobs.items() if job not in harness.running]
            if waiting:
                harness.withdraw(rng.choice(waiting))
        harness.dispatch()
        if strict and not at % 8:
            harness.queue.check_invariants()
    while harness.jobs:
        harness.dispatch()
        job = harness.running[0]
        harness.work(job, job.actual)
        harness.end(job)
    harness.queue.check_invariants()
    assert harness.queue.num_queued == harness.queue.num_running == len(harness.queue.books) == 0
    return harness


def same_choices(one: QueueClass, other: QueueClass, seeds: range) -> None:
    """Two classes dispatch alike, and their clocks and tags are equal to the last digit all the while."""
    for seed in seeds:
        first, second = (random_schedule(make, seed, reweighs=seed % 2 > 0, plain=True) for make in (one, other))
        assert first.dispatched == second.dispatched
        assert first.seen == second.seen


def exact_reservations(make: QueueClass, seed: int, *, plain: bool = False) -> None:
    """With costs known beforehand and all flows backlogged, what was dispatched is apart by one item of each at most,
    however many run at once."""
    rng = random.Random(seed)
    shares = {f"flow{i}": Share(rng.choice([1, 2, 5])) for i in range(3)}
    harness = Harness(make, shares, rng.randint(1, 12), plain=plain)
    costs = {flow: rng.choice([1, 10, 30]) for flow in shares}
    for flow, cost in costs.items():
        for _ in range(60):
            harness.arrive(flow, actual=cost, reserve=cost)
    started = dict.fromkeys(shares, 0)
    seen = 0
    while True:
        harness.dispatch()
        for item in harness.dispatched[seen:]:
            started[harness.jobs[item].flow] += 1
            for f, g in itertools.combinations(shares, 2):
                tags = [started[x] * costs[x] * (TAG_SCALE // shares[x].weight) for x in (f, g)]
                limit = sum(costs[x] * (TAG_SCALE // shares[x].weight) for x in (f, g))
                assert abs(tags[0] - tags[1]) <= limit, f"{f} and {g}: dispatched {started}"
        seen = len(harness.dispatched)
        if any(not book.queued for book in harness.books.values()):
            return
        job = harness.running[0]
        harness.work(job, job.actual)
        harness.end(job)


def weights_are_honoured(make: QueueClass, *, plain: bool = False) -> None:
    """Weights 1:2:4:8, all backlogged: shares within 2 % though the estimates are far off."""
    shares = {"one": Share(1), "two": Share(2), "four": Share(4), "eight": Share(8)}
    harness = Harness(make, shares, 8, counters=not plain, plain=plain)
    rng = random.Random(7)
    for _ in range(3_000):
        for flow, book in harness.books.items():
            if len(book.queued) < 2:
                harness.arrive(flow, actual=rng.randint(1, 20), reserve=rng.randint(20 * plain, 40))
        harness.dispatch()
        job = rng.choice(harness.running)
        harness.work(job, job.actual)
        harness.end(job)
    total = sum(book.worked for book in harness.books.values())
    for flow, share in shares.items():
        got = harness.books[flow].worked / total
        assert abs(got / (share.weight / 15) - 1) <= 0.02, f"{flow} got {got:.3f} of the service"


def idling_banks_nothing(make: QueueClass, running_meanwhile: bool, *, plain: bool = False) -> None:
    """A flow that was idle for long, with or without something running, shares equally from its return on."""
    harness = Harness(make, {"busy": Share(1), "idler": Share(1)}, 2, plain=plain)
    harness.arrive("idler", actual=10, reserve=10)
    harness.dispatch()
    if not running_meanwhile:
        harness.work(harness.running[0], 10)
        harness.end(harness.running[0])

    def serve(jobs: int) -> None:
        for _ in range(jobs):
            while len(harness.books["busy"].queued) < 3:
                harness.arrive("busy", actual=10, reserve=10)
            harness.dispatch()
            job = next(job for job in harness.running if job.item or not running_meanwhile)
            harness.work(job, 10)
            harness.end(job)

    serve(300)
    before = {flow: book.worked for flow, book in harness.books.items()}
    for _ in range(200):
        harness.arrive("idler", actual=10, reserve=10)
    serve(200)
    got = {flow: book.worked - before[flow] for flow, book in harness.books.items()}
    assert abs(got["busy"] - got["idler"]) <= 60, f"after an idle time: {got}"


def flood_delays_nobody(make: QueueClass) -> None:
    """One flow queues 2,000 items, another sends one: it is the next to start."""
    queue = make()
    for item in range(2_000):
        queue.push(item, "flood", share=Share(1), rank=Rank(0, 0, item))
    for item in range(50):
        pick = queue.select(lambda _: True)
        assert pick is not None
        assert pick.item == item
        queue.dispatch(pick, 10)
    queue.push(9_999, "single", share=Share(1), rank=Rank(0, 0, 9_999))
    pick = queue.select(lambda _: True)
    assert pick is not None
    assert pick.item == 9_999


def boosts_end_at_their_cap(make: QueueClass) -> None:
    """Two flows, one ahead by exactly the other's cap: the tie goes to the older flow; one unit less, and it does not.
    An age of any length changes nothing."""
    for short, waited_us, urgent in itertools.product([0, 1], [10 * US_PER_S, 3600 * US_PER_S], [None, 5]):
        queue = make(aging_per_s=1000)
        older, boosted = Share(1), Share(1, 0, 50)
        queue.push(0, "older", share=older, need=1, rank=Rank(0, 0, 0))
        queue.push(1, "boosted", share=boosted, need=1, rank=Rank(0, 0, 1), urgent_us=urgent)
        queue.count("source", {"older": 100, "boosted": 150 - short}, {"older": older, "boosted": boosted}.__getitem__)
        pick = queue.select(lambda _: True, waited_us)
        assert pick is not None
        assert pick.item == (1 if short else 0), "a boost went beyond its cap, or did not reach it"
        assert pick.floor == 100 * TAG_SCALE


def age_is_of_who_gets_nothing(make: QueueClass) -> None:
    """A flood that is served all the time is not before one of its kind that comes anew and got less, however long its
    items have waited. One that got nothing is."""
    share = Share(4, 0, 500)
    for is_served in (True, False):
        queue = make(aging_per_s=100)
        for item in range(100):
            queue.push(item, "flood", share=share, need=1, rank=Rank(0, 0, item))
        now_us = 0
        for _ in range(50):
            now_us += US_PER_S // 10
            if is_served:
                pick = queue.select(lambda _: True, now_us)
                assert pick is not None
                queue.dispatch(pick, 10)
        queue.push(100, "new", share=share, need=1, rank=Rank(0, 0, 100), since_us=now_us)
        queue.count("source", {"flood": 50}, lambda _: share)  # ahead of the other, by less than its age would make up
        pick = queue.select(lambda _: True, now_us)
        assert pick is not None
        assert (pick.item == 100) is is_served


def push(queue: FairQueue[Any, Any], item: Hashable, flow: Hashable, order: int, *, need: int = 1, **what: Any) -> None:
    rank = Rank(-what.get("priority", 0), what.get("due_us", 0), order)
    queue.push(item, flow, share=Share(what.get("weight", 1)), need=need, rank=rank)


def start(queue: FairQueue[Any, Any], reserve: int, *, without: Hashable = None) -> Any:
    """Dispatches what is next, of all but one item; returns it."""
    pick = queue.select(lambda item: None if item == without else True, 0)
    if pick is None:
        return None
    queue.dispatch(pick, reserve)
    return pick.item


def charge(queue: FairQueue[Any, Any], flow: Hashable, total: int, weight: int = 1) -> None:
    queue.count("source", {flow: total}, lambda _: Share(weight))


def run_suite(make: QueueClass, seeds: range, *, plain: bool = False) -> None:
    """Everything; raises AssertionError where the class fails."""
    flood_delays_nobody(make)
    if not plain:
        boosts_end_at_their_cap(make)
        age_is_of_who_gets_nothing(make)
    idling_banks_nothing(make, running_meanwhile=False, plain=plain)
    idling_banks_nothing(make, running_meanwhile=True, plain=plain)
    weights_are_honoured(make, plain=plain)
    for seed in seeds:
        exact_reservations(make, seed, plain=plain)
        random_schedule(make, seed, plain=plain)
    for seed in seeds[:: len(seeds) // 10 or 1]:
        random_schedule(make, seed, reweighs=True, plain=plain)


# ---- the rules that both have, broken: mixed into either class


class NoLift:
    def _lift(self, flow: Any) -> None:
        pass


class LiftToTheLeastOfTheOthers:
    books: dict[Any, Any]

    def _lift(self, flow: Any) -> None:
        others = [f.tag for f in self.books.values() if f.num_queued and f is not flow]
        flow.settled += max(0, min(others, default=0) - flow.tag)


class ChargeAfter:
    def _reserve(self, flow: Any, item: Any, cost: int) -> None:
        pass


class RefundForgotten:
    def _refund(self, flow: Any, item: Any) -> None:
        left = flow.unspent.pop(item, 0)
        flow.reserved -= left
        flow.settled += left * flow.inverse


class RefundTwice:
    def _refund(self, flow: Any, item: Any) -> None:
        left = flow.unspent.pop(item, 0)
        flow.reserved -= left
        flow.settled -= left * flow.inverse


class StoppedClock:
    def _advance_clock(self, pick: Any) -> None:
        pass


class FallingClock:
    """The clock falls with the tag of whoever was chosen last."""

    virtual_time: int

    def _advance_clock(self, pick: Any) -> None:
        self.virtual_time = pick.floor


class WeightsIgnored:
    def remember(self, flow: Any, share: Share) -> Any:
        return super().remember(flow, share._replace(weight=1))  # type: ignore[misc]


class TagMovesWithItsWeight:
    """What is reserved counts anew at another weight."""

    def _share(self, flow: Any, share: Share) -> None:
        settled = flow.settled
        super()._share(flow, share)  # type: ignore[misc]
        flow.settled = settled


class CreditKept:
    def forgo(self, flow: Any) -> None:
        pass


class ClockBehindWhatWasDone:
    def _catch_up(self, newcomer: Any) -> None:
        pass


class CaughtUpWithReservations:
    """A newcomer waits for what others have only reserved."""

    books: dict[Any, Any]
    virtual_time: int

    def _catch_up(self, newcomer: Any) -> None:
        others = [flow.tag for flow in self.books.values() if flow.num_queued and flow.key != newcomer]
        self.virtual_time = max(self.virtual_time, min(others, default=0))
        self._forget_passed()  # type: ignore[attr-defined]


SHARED_MUTANTS: list[type] = [
    NoLift,
    LiftToTheLeastOfTheOthers,
    ChargeAfter,
    RefundForgotten,
    RefundTwice,
    StoppedClock,
    FallingClock,
    WeightsIgnored,
    TagMovesWithItsWeight,
]
UNLIKE_MUTANTS: list[type] = [CreditKept, ClockBehindWhatWasDone, CaughtUpWithReservations]
"""What keeps the bound and makes other choices than the unbroken class."""


def broken(rule: type, make: type) -> Any:
    """A class with one rule broken."""
    return type(f"{rule.__name__}{make.__name__}", (rule, make), {})
