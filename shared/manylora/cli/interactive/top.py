"""`manylora top`: who uses the cluster now. A table at a time, sorted by a column that the keys choose.

What is shown of two statuses is pure; the terminal and its keys are at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from manylora.cli.output import Target, usage_error
from manylora.cli.overview import state_of
from manylora.client import ClusterStatus, FlowStatus, RequestFailed

if TYPE_CHECKING:
    from rich.console import RenderableType

_KEYS = "t tenants  f flows  w workers  < > sort by  r reverse  q quit"
_HEAD_LINES = 6  # around the rows


class Seen(NamedTuple):
    status: ClusterStatus
    at_s: float


class Row(NamedTuple):
    values: tuple[Any, ...]  # a column each, by which rows are sorted
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    name: str
    text: Callable[[Any], str] = str


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _mib(value: float) -> str:
    return f"{value / (1 << 20):.1f} MiB"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _part(value: float) -> str:
    return f"{100 * value:.0f} %"


_TENANTS = (
    Column("tenant"),
    Column("weighted tokens/s", _rate),
    Column("running"),
    Column("queued"),
    Column("oldest wait", _seconds),
    Column("KV", _mib),
    Column("adapters", _mib),
    Column("preempted/s", _rate),
)
_FLOWS = (
    Column("tenant"),
    Column("class"),
    Column("weighted tokens/s", _rate),
    Column("running"),
    Column("queued"),
    Column("oldest wait", _seconds),
    Column("TTFT p95", _ms),
)
_WORKERS = (
    Column("worker"),
    Column("tokens/s", _rate),
    Column("running"),
    Column("slots"),
    Column("KV in use", _part),
    Column("adapters on device"),
    Column("state"),
)


def _tenants(now: Seen, before: Seen | None) -> Iterator[tuple[Any, ...]]:
    scheduler = now.status.scheduler
    flows: dict[str, list[FlowStatus]] = {}
    for flow in scheduler.flows:
        flows.setdefault(flow.tenant_id, []).append(flow)
    kv = {each.tenant_id: each.device_bytes for each in scheduler.kv}
    adapters = {each.tenant_id: each.device_bytes for each in scheduler.adapters}
    served = _a_second(now, before, lambda status: _served(status, by_class=False))
    preempted = _a_second(
        now, before, lambda status: {each.tenant_id: each.preemptions for each in status.scheduler.setbacks}
    )
    for tenant in flows.keys() | kv.keys() | adapters.keys():
        own = flows.get(tenant, [])
        yield (
            tenant,
            served.get(tenant),
            sum(flow.running for flow in own),
            sum(flow.queued for flow in own),
            max((flow.oldest_wait_s for flow in own), default=0.0),
            kv.get(tenant, 0),
            adapters.get(tenant, 0),
            preempted.get(tenant),
        )


def _flows(now: Seen, before: Seen | None) -> Iterator[tuple[Any, ...]]:
    ttft = {(slo.tenant_id, slo.qos_class): slo.ttft_p95_ms for slo in now.status.slos}
    served = _a_second(now, before, lambda status: _served(status, by_class=True))
    for flow in now.status.scheduler.flows:
        key = (flow.tenant_id, flow.qos_class)
        yield (*key, served.get(key), flow.running, flow.queued, flow.oldest_wait_s, ttft.get(key))


def _workers(now: Seen, before: Seen | None) -> Iterator[tuple[Any, ...]]:
    generated = _a_second(
        now, before, lambda status: {worker.worker_id: worker.generated_tokens for worker in status.workers}
    )
    for worker in now.status.workers:
        used = worker.kv_blocks_total - worker.kv_blocks_free
        yield (
            worker.worker_id,
            generated.get(worker.worker_id),
            worker.running,
            worker.sequence_slots,
            used / worker.kv_blocks_total if worker.kv_blocks_total else 0.0,
            worker.adapters_on_device,
            state_of(worker),
        )


def _served(status: ClusterStatus, *, by_class: bool) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for flow in status.scheduler.flows:
        key = (flow.tenant_id, flow.qos_class) if by_class else flow.tenant_id
        found[key] = found.get(key, 0) + flow.served_cost
    return found


def _a_second(
    now: Seen, before: Seen | None, counts: Callable[[ClusterStatus], Mapping[Any, int]]
) -> dict[Any, float | None]:
    """By key. None: not known; a count that fell began anew, with another scheduler or worker."""
    if before is None or before.at_s >= now.at_s or before.status.scheduler.epoch != now.status.scheduler.epoch:
        return {}
    earlier, passed_s = counts(before.status), now.at_s - before.at_s
    grown = {key: count - earlier.get(key, 0) for key, count in counts(now.status).items()}
    return {key: more / passed_s if more >= 0 else None for key, more in grown.items()}


_VIEWS: dict[str, tuple[tuple[Column, ...], Callable[[Seen, Seen | None], Iterator[tuple[Any, ...]]]]] = {
    "tenants": (_TENANTS, _tenants),
    "flows": (_FLOWS, _flows),
    "workers": (_WORKERS, _workers),
}


class View:
    """What the keys have chosen."""

    name: str
    sorted_by: int
    descending: bool

    def __init__(self) -> None:
        self._choose("tenants")

    def press(self, key: str) -> bool:
        """Whether to go on. Keys that mean nothing do nothing."""
        names = {name[0]: name for name in _VIEWS}
        if key in names:
            self._choose(names[key])
        elif key in "<,":
            self.sorted_by = (self.sorted_by - 1) % len(self.columns)
        elif key in ">.":
            self.sorted_by = (self.sorted_by + 1) % len(self.columns)
        elif key == "r":
            self.descending = not self.descending
        return key not in ("q", "\x1b", "\x03")

    def _choose(self, name: str) -> None:
        """By its rate, the busiest first."""
        self.name = name
        self.sorted_by = next(index for index, column in enumerate(self.columns) if column.text is _rate)
        self.descending = True

    @property
    def columns(self) -> tuple[Column, ...]:
        return _VIEWS[self.name][0]

    def rows(self, now: Seen, before: Seen | None) -> list[Row]:
        """What is not known comes last; equals by their names."""
        found = sorted(_VIEWS[self.name][1](now, before), key=lambda values: values[0])
        known = [values for values in found if values[self.sorted_by] is not None]
        known.sort(key=lambda values: values[self.sorted_by], reverse=self.descending)
        known += [values for values in found if values[self.sorted_by] is None]
        return [
            Row(values, tuple(column.text(value) for column, value in zip(self.columns, values, strict=True)))
            for values in known
        ]


def screen(view: View, now: Seen, before: Seen | None, *, lines: int, problem: str = "") -> RenderableType:
    """lines: of the terminal; rows that do not fit are counted."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status, rows = now.status, view.rows(now, before)
    fitting = max(1, lines - _HEAD_LINES)
    queued = sum(flow.queued for flow in status.scheduler.flows)
    running = sum(flow.running for flow in status.scheduler.flows)
    level = status.scheduler.overload.level
    head = (
        f"{status.base_model}   {len(status.workers)} workers   {status.tenants} tenants   {status.adapters} adapters"
    )
    head += f"   {running} running   {queued} queued" + (f"   overload level {level}" if level else "")
    mark = " v" if view.descending else " ^"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for index, column in enumerate(view.columns):
        table.add_column(
            Text(column.name + (mark if index == view.sorted_by else "")),
            justify="left" if isinstance(rows[0].values[index] if rows else "", str) else "right",
            no_wrap=True,
        )
    for row in rows[:fitting]:
        table.add_row(*(Text(text) for text in row.texts))
    hidden = f"   {len(rows) - fitting} more" if len(rows) > fitting else ""
    return Group(Text(head, no_wrap=True), Text(problem, style="bold red"), table, Text(_KEYS + hidden, style="dim"))


async def show(target: Target, interval_s: float) -> None:
    """Until a key ends it. What the terminal was is restored."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise usage_error("top needs a terminal; `manylora status` prints the same numbers once")
    from rich.console import Console
    from rich.live import Live

    loop, console, view = asyncio.get_running_loop(), Console(highlight=False), View()
    pressed: asyncio.Queue[str] = asyncio.Queue()
    async with target.client() as client:
        now, before, problem = Seen(await client.status(), loop.time()), None, ""
        with _keys(pressed), Live(console=console, screen=True, auto_refresh=False) as live:
            asked_at = loop.time()
            while True:
                live.update(screen(view, now, before, lines=console.size.height, problem=problem), refresh=True)
                try:
                    async with asyncio.timeout_at(asked_at + interval_s):
                        if not view.press(await pressed.get()):
                            return
                    continue
                except TimeoutError:
                    asked_at = loop.time()
                try:
                    status = await client.status(timeout_s=max(2.0, interval_s))
                    now, before, problem = Seen(status, loop.time()), now, ""
                except RequestFailed as error:
                    problem = str(error)


@contextlib.contextmanager
def _keys(pressed: asyncio.Queue[str]) -> Iterator[None]:
    """Each key at once, unshown. Ctrl-C is one."""
    import termios
    import tty

    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def read() -> None:
        text = os.read(fd, 64).decode(errors="replace")
        for key in {"\x1b[D": "<", "\x1b[C": ">"}.get(text, text) or "q":  # arrows; the end of the input
            pressed.put_nowait(key)

    tty.setraw(fd, termios.TCSADRAIN)
    changed = termios.tcgetattr(fd)
    changed[1] |= termios.OPOST  # rich ends lines with a line feed alone
    termios.tcsetattr(fd, termios.TCSADRAIN, changed)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
