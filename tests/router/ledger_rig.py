"""Routers' logs and a sink, killed at any point: what must be in the sink when all is over."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manylora_router.ledger.log import Log, segment_path
from manylora_router.ledger.sealing import LogSeals
from manylora_router.ledger.shipping import Shipper
from manylora_shared.ledger.frames import NoSeal, frame
from manylora_shared.ledger.records import end_record, note_record, open_record
from manylora_shared.ledger.row import LOST, UsageRow
from manylora_shared.ledger.usage import Query, Sum, summed
from manylora_shared.ledger_sinks.base import MAX_PAGE, Page, Sink, SinkDown

SEGMENT = 1 << 15


class Killed(Exception):
    """The process dies here."""


class MemorySink:
    """`fails`: asked before and after a put: None, an error to raise."""

    def __init__(self) -> None:
        self.rows: dict[str, UsageRow] = {}
        self.puts = 0
        self.rng: random.Random | None = None

    def put(self, rows: Sequence[UsageRow]) -> None:
        self._fail()
        for row in rows:
            self.puts += 1
            self.rows.setdefault(row.request_id, row)
        self._fail()  # it has them, and nobody hears of it

    def _fail(self) -> None:
        if self.rng is not None and self.rng.random() < 0.05:
            raise SinkDown("away") if self.rng.random() < 0.5 else Killed

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
        self._between = between

    def put(self, rows: Sequence[UsageRow]) -> None:
        self._fail()
        if self.rng is not None and self.rng.random() < 0.05:
            self._between()
        self.puts += len(rows)
        self.sink.put(rows)
        self._fail()

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

    def __post_init__(self) -> None:
        self.log = Log(
            self.root / self.name, max_bytes=1 << 30, seal=NoSeal(), standing=self._standing, segment_bytes=SEGMENT
        )
        self.shipper = Shipper(self.root, self.log, self.sink, LogSeals(None), lambda row: row, "unused")

    def _standing(self) -> list[Sequence[object]]:
        notes = [note_record(1.0, {each: self.noted[each]}) for each in self.running if each in self.noted]
        return [*(open_record(row) for row in self.running.values()), *notes]

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
            each: replace(row, outcome=LOST, completion_tokens=self.noted.get(each, (0, 0, 0))[2])
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
        self.requests = self.deaths = self.routers_made = 0
        self.routers = [self._router(), self._router()]

    def _router(self) -> Router:
        self.routers_made += 1
        return Router(self.root, f"router-{self.routers_made}", self.sink)

    def run(self, requests: int) -> None:
        self.sink.rng = self.rng
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
                router.log.sync()
            elif draw < 0.985:
                router.shipper.ship()
            elif draw < 0.995:
                router.shipper.adopt()
            elif draw < 0.997:
                record = frame(end_record(UsageRow(request_id="torn", tenant="t")), NoSeal())
                self._kill(index, record[: rng.randrange(len(record))])
        except SinkDown:
            pass
        except Killed:
            self._kill(index, b"")

    def _kill(self, index: int, torn: bytes) -> None:
        self.deaths += 1
        self.wanted |= self.routers[index].die(torn)
        self.routers[index] = self._router()

    def _begin(self, router: Router) -> None:
        self.requests += 1
        row = UsageRow(request_id=f"r{self.requests}", tenant=self.rng.choice("abc"), began_unix_s=1.0)
        router.running[row.request_id] = row
        self._append(router, open_record(row))

    def _end(self, router: Router) -> None:
        if router.running:
            request_id = (
                self.rng.choice(list(router.running)) if len(router.running) < 50 else next(iter(router.running))
            )
            row = replace(
                router.running.pop(request_id),
                outcome="completed",
                prompt_tokens=self.rng.randrange(100),
                completion_tokens=self.rng.randrange(100, 200),
            )
            self._append(router, end_record(row))
            self.wanted[request_id] = row

    def _note(self, router: Router) -> None:
        for request_id in list(router.running)[-4:]:
            router.noted[request_id] = (0, 0, self.rng.randrange(100), 0, 0)
            self._append(router, note_record(1.0, {request_id: router.noted[request_id]}))

    def _append(self, router: Router, record: Sequence[object]) -> None:
        if not router.log.append(record):
            router.log.sync()  # makes the next segment
            assert router.log.append(record)
