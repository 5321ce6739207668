"""Routers' logs and a sink, killed at any point: what must be in the sink when all is over."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from manylora_router.ledger.log import Log, segment_path, segments_of
from manylora_router.ledger.sealing import LogSeals
from manylora_router.ledger.shipping import Shipper
from manylora_shared.ledger.frames import NoSeal, frame, records
from manylora_shared.ledger.records import end_record, note_record, open_record
from manylora_shared.ledger.row import LOST, UsageRow
from manylora_shared.ledger.usage import Query, Sum, summed
from manylora_shared.ledger_sinks.base import MAX_PAGE, Page, Sink, SinkDown

SEGMENT = 1 << 15


# where a router dies
APPENDED, TORN, SEND, COMMIT, REMOVE, POWER = (
    "behind a record that it wrote",
    "in the midst of a record",
    "before rows are sent",
    "when the sink has them and the router has not heard of it",
    "when a log's file is to be removed",
    "with the machine: what was not synced is gone, or a part of it",
)
POINTS = (APPENDED, TORN, SEND, COMMIT, REMOVE, POWER)


class Killed(Exception):
    """The process dies here, at the point that is its argument."""


class MemorySink:
    """`fails`: asked before and after a put: None, an error to raise."""

    def __init__(self) -> None:
        self.rows: dict[str, UsageRow] = {}
        self.puts = 0
        self.rng: random.Random | None = None

    def put(self, rows: Sequence[UsageRow]) -> None:
        self._fail(SEND)
        for row in rows:
            self.puts += 1
            self.rows.setdefault(row.request_id, row)
        self._fail(COMMIT)  # it has them, and nobody hears of it

    def has(self, request_id: str) -> bool:
        return request_id in self.rows

    def _fail(self, where: str) -> None:
        if self.rng is not None and self.rng.random() < 0.05:
            raise SinkDown("away") if self.rng.random() < 0.5 else Killed(where)

    def page(self, query: Query, after: str, limit: int) -> Page:
        return Page([row for row in self.rows.values() if query.takes(row)], "")

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        return summed(filter(query.takes, self.rows.values()), by)

    def close(self) -> None:
        return


class Kept(MemorySink):
    """What a real sink is given; `between`: called now and then before it is."""

    def __init__(self, sink: Sink, between: Callable[[], None]) -> None:
        super().__init__()
        self.sink = sink
        self.known: set[str] = set()
        self._between = between

    def put(self, rows: Sequence[UsageRow]) -> None:
        self._fail(SEND)
        if self.rng is not None and self.rng.random() < 0.05:
            self._between()
        self.puts += len(rows)
        self.sink.put(rows)
        self.known |= {row.request_id for row in rows}
        self._fail(COMMIT)

    def has(self, request_id: str) -> bool:
        return request_id in self.known

    def all_rows(self) -> list[UsageRow]:
        found: list[UsageRow] = []
        page = self.sink.page(Query(), "", MAX_PAGE)
        while page.rows:
            found += page.rows
            page = self.sink.page(Query(), page.after, MAX_PAGE) if page.after else Page([], "")
        return found


@dataclass
class Router:
    """One router's life. It writes as the ledger does, and its shipper's turns come when the rig says."""

    root: Path
    name: str
    sink: MemorySink
    running: dict[str, UsageRow] = field(default_factory=dict)
    noted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)  # no record of these is synced
    ended: set[str] = field(default_factory=set)  # whose ends are not synced

    def __post_init__(self) -> None:
        self.log = Log(
            self.root / self.name, max_bytes=1 << 30, seal=NoSeal(), standing=self._standing, segment_bytes=SEGMENT
        )
        self.shipper = Shipper(self.root, self.log, self.sink, LogSeals(None), lambda row: row, "unused")

    def _standing(self) -> list[Sequence[object]]:
        notes = [note_record(1.0, {each: self.noted[each]}) for each in self.running if each in self.noted]
        return [*(open_record(row) for row in self.running.values()), *notes]

    def sync(self) -> None:
        self.log.sync()
        self.unsure.clear()
        self.ended.clear()

    def left(self) -> tuple[set[str], dict[str, UsageRow]]:
        """By what is on the disk: what has ended, and what is lost with which tokens."""
        ended: set[str] = set()
        left: dict[str, UsageRow] = {}
        for number in segments_of(self.log.folder):
            for read in records(segment_path(self.log.folder, number).read_bytes(), NoSeal()):
                match read.record:
                    case ["o", [str(request_id), str(tenant), *_]]:
                        row = UsageRow(request_id=request_id, tenant=tenant, began_unix_s=1.0, outcome=LOST)
                        left.setdefault(request_id, row)
                    case ["n", _, [[request_id, _, _, tokens, *_]]] if request_id in left:
                        left[request_id] = left[request_id]._replace(completion_tokens=tokens)
                    case ["e", [str(request_id), *_]]:
                        ended.add(request_id)
                        left.pop(request_id, None)
        return ended, left

    def die(self, torn: bytes = b"") -> dict[str, UsageRow]:
        """As kill -9 does; `torn`: of a record that it was writing. Returns the rows of what it ran."""
        number, written = self.log.place
        if torn and written + len(torn) < SEGMENT:
            path = segment_path(self.log.folder, number)
            data = bytearray(path.read_bytes())
            data[written : written + len(torn)] = torn
            path.write_bytes(data)
        self.log.abandon()
        return {
            each: row._replace(outcome=LOST, completion_tokens=self.noted.get(each, (0, 0, 0))[2])
            for each, row in self.running.items()
        }


@dataclass
class Rig:
    root: Path
    seed: int
    sink: MemorySink = field(default_factory=MemorySink)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.wanted: dict[str, UsageRow] = {}
        self.requests = self.routers_made = self.never_synced = 0
        self.deaths: Counter[str] = Counter()
        self._dead: list[Router] = []
        self._durable: dict[str, int] = {}  # bytes by path
        self._gone: set[str] = set()
        self.routers = [self._router(), self._router()]

    def _router(self) -> Router:
        self.routers_made += 1
        return Router(self.root, f"router-{self.routers_made}", self.sink)

    def run(self, requests: int) -> None:
        self.sink.rng = self.rng
        unlink, rng = Path.unlink, self.rng

        def dies(path: Path, missing_ok: bool = False) -> None:
            if rng.random() < 0.02:
                raise Killed(REMOVE)
            unlink(path, missing_ok=missing_ok)

        with mock.patch.object(Path, "unlink", dies), mock.patch.object(os, "fdatasync", self._synced):
            while self.requests < requests:
                self._act(self.rng.randrange(2))
        self.sink.rng = None
        for router in self.routers:
            self.wanted |= router.die()
        last = self._router()
        last.shipper.adopt()
        last.die()

    def _act(self, index: int) -> None:
        router, rng = self.routers[index], self.rng
        draw = rng.random()
        try:
            if draw < 0.45:
                self._begin(router)
            elif draw < 0.85:
                self._end(router)
            elif draw < 0.95:
                self._note(router)
            elif draw < 0.97:
                router.sync()
            elif draw < 0.985:
                router.shipper.ship()
            elif draw < 0.995:
                router.shipper.adopt()
            elif draw < 0.997:
                record = frame(end_record(UsageRow(request_id="torn", tenant="t")), NoSeal())
                self._kill(index, TORN, record[: rng.randrange(1, len(record))])
            elif draw < 0.998:
                self._kill(index, APPENDED)
            elif draw < 0.999:
                self._lose_power()
        except SinkDown:
            pass
        except Killed as killed:
            self._kill(index, str(killed))

    def _kill(self, index: int, point: str, torn: bytes = b"") -> None:
        self.deaths[point] += 1
        self.wanted |= self.routers[index].die(torn)
        self._dead.append(self.routers[index])
        self.routers[index] = self._router()

    def _synced(self, fd: int) -> None:
        self._durable[os.readlink(f"/proc/self/fd/{fd}")] = len(os.pread(fd, SEGMENT, 0).rstrip(b"\0"))

    def _lose_power(self) -> None:
        """All routers are of one machine. The sink has what it took; of what was not synced some is on the disk."""
        self.deaths[POWER] += 1
        for path in self.root.glob("*/*.wal"):
            data, least = path.read_bytes(), self._durable.get(str(path), 0)
            cut = self.rng.randrange(least, SEGMENT + 1) if self.rng.random() < 0.5 else least + self.rng.randrange(999)
            path.write_bytes(data[:cut] + bytes(max(0, SEGMENT - cut)))
            self._durable[str(path)] = SEGMENT
        for router in self.routers:
            router.log.abandon()
        self._dead = [router for router in self._dead if router.log.folder.exists()]
        for router in self.routers + self._dead:
            ended, left = router.left()
            for request_id in router.ended | set(router.running):
                if self.sink.has(request_id) or request_id in ended:
                    continue
                self.wanted.pop(request_id, None)
                if request_id in left:
                    self.wanted[request_id] = left[request_id]
                else:
                    assert request_id in router.unsure, "a record that was synced is gone"
                    self.never_synced += request_id not in self._gone
                    self._gone.add(request_id)
        self._dead += self.routers
        self.routers = [self._router(), self._router()]

    def _begin(self, router: Router) -> None:
        self.requests += 1
        row = UsageRow(request_id=f"r{self.requests}", tenant=self.rng.choice("abc"), began_unix_s=1.0)
        router.running[row.request_id] = row
        router.unsure.add(row.request_id)
        self._append(router, open_record(row))

    def _end(self, router: Router) -> None:
        if router.running:
            request_id = (
                self.rng.choice(list(router.running)) if len(router.running) < 50 else next(iter(router.running))
            )
            row = router.running.pop(request_id)._replace(
                outcome="completed",
                prompt_tokens=self.rng.randrange(100),
                completion_tokens=self.rng.randrange(100, 200),
            )
            router.ended.add(request_id)
            self._append(router, end_record(row))
            self.wanted[request_id] = row

    def _note(self, router: Router) -> None:
        for request_id in list(router.running)[-4:]:
            router.noted[request_id] = (0, 0, self.rng.randrange(100), 0, 0)
            self._append(router, note_record(1.0, {request_id: router.noted[request_id]}))

    def _append(self, router: Router, record: Sequence[object]) -> None:
        if not router.log.append(record):
            router.sync()  # makes the next segment
            assert router.log.append(record)
