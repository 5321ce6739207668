"""What is shown while it runs: a live table on a terminal, else a line now and then. On stderr."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manylora.load.report import shown_ms
from manylora.load.run import Run
from manylora.load.tally import Tally

_LOOK_S = 0.5
_LINE_S = 5.0
_MAX_ROWS = 20


@asynccontextmanager
async def shown(run: Run) -> AsyncIterator[None]:
    watching = asyncio.create_task(_live(run) if sys.stderr.isatty() else _lines(run))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _live(run: Run) -> None:
    rate = Rate(run)
    with Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True) as live:
        while True:
            live.update(screen(run, rate.now()), refresh=True)
            await asyncio.sleep(_LOOK_S)


async def _lines(run: Run) -> None:
    rate = Rate(run)
    while True:
        await asyncio.sleep(_LINE_S)
        print(head(run, rate.now()), file=sys.stderr, flush=True)


class Rate:
    """Tokens a second since the look before."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = (time.perf_counter(), run.tokens)

    def now(self) -> float:
        (then_s, tokens), self._before = self._before, (time.perf_counter(), self._run.tokens)
        return (self._before[1] - tokens) / max(1e-3, self._before[0] - then_s)


def head(run: Run, tokens_per_s: float) -> str:
    total = run.total
    passed_s = 0.0 if run.began_s is None else time.perf_counter() - run.began_s
    of = "" if run.mix.duration_s is None else f" of {run.mix.duration_s:g}"
    errors = sum(total.errors.values())
    return (
        f"{passed_s:.0f}{of} s   {run.running} running   {total.completed} done   {errors} failed   "
        f"{tokens_per_s:.0f} tokens/s   TTFT p50 {_ms(total, 'ttft')}"
    )


def screen(run: Run, tokens_per_s: float) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tenant", "running", "done", "failed", "tokens", "TTFT p50", "p99", "ITL p50", "p99", "last error"):
        table.add_column(column, justify="left" if column in ("tenant", "last error") else "right", no_wrap=True)
    busiest = sorted(run.tallies.items(), key=lambda item: -item[1].output_tokens)
    for name, tally in busiest[:_MAX_ROWS]:
        numbers = (tally.running, tally.completed, sum(tally.errors.values()), tally.output_tokens)
        times = (_ms(tally, "ttft"), _ms(tally, "ttft", 99), _ms(tally, "itl"), _ms(tally, "itl", 99))
        error = next(reversed(tally.errors), "")
        table.add_row(*(Text(str(cell)) for cell in (name, *numbers, *times, error)))
    more = len(busiest) - _MAX_ROWS
    return Group(
        Text(head(run, tokens_per_s), no_wrap=True), table, Text(f"{more} more" if more > 0 else "", style="dim")
    )


def _ms(tally: Tally, what: str, percent: float = 50) -> str:
    value = {"ttft": tally.ttft, "itl": tally.itl}[what].percentile(percent)
    return "-" if math.isnan(value) else shown_ms(1e3 * value)
