"""How the demo shows its streams: panels side by side on a terminal, a line an answer elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from manylora.demo.measure import DemoTenant, View

ROWS_SHOWN = 12
REFRESHES_PER_S = 15
PANEL_COLUMNS = 38


@dataclass
class _Row:
    sender: DemoTenant
    text: str
    answer: str = ""
    expected: bool | None = None  # None while it streams


class Panels:
    """One panel a tenant, with its latest streams."""

    def __init__(self, tenants: Sequence[DemoTenant]) -> None:
        self._tenants = tenants
        self._title = ""
        self._rows: dict[int, _Row] = {}

    def title(self, text: str) -> None:
        self._title = text
        self._rows.clear()

    def begin(self, stream: int, sender: DemoTenant, text: str) -> None:
        self._rows[stream] = _Row(sender, text)

    def append(self, stream: int, text: str) -> None:
        self._rows[stream].answer += text

    def end(self, stream: int, *, expected: bool) -> None:
        self._rows[stream].expected = expected

    def __rich__(self) -> RenderableType:
        panels = [self._panel(tenant) for tenant in self._tenants]
        return Group(Text(self._title, style="bold"), Columns(panels, width=PANEL_COLUMNS))

    def _panel(self, tenant: DemoTenant) -> Panel:
        rows = [row for row in self._rows.values() if row.sender is tenant]
        shown = Text(no_wrap=True, overflow="ellipsis")
        for row in rows[-ROWS_SHOWN:]:
            shown.append(f"{row.text:>6} ", style="dim")
            shown.append(row.answer)
            if row.expected is not None:
                shown.append(" ok" if row.expected else " no", style="green" if row.expected else "red")
            shown.append("\n")
        done = sum(row.expected is not None for row in rows)
        title = f"{tenant.tenant} / {tenant.skill.adapter}"
        return Panel(shown, title=title, subtitle=f"{done} answers", height=ROWS_SHOWN + 2)


class Lines:
    """One line for each finished answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[int, _Row] = {}

    def title(self, text: str) -> None:
        self._rows.clear()
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, stream: int, sender: DemoTenant, text: str) -> None:
        self._rows[stream] = _Row(sender, text)

    def append(self, stream: int, text: str) -> None:
        self._rows[stream].answer += text

    def end(self, stream: int, *, expected: bool) -> None:
        row = self._rows.pop(stream)
        mark = "ok" if expected else "no"
        line = f"  {row.sender.tenant:<8}{row.sender.skill.adapter:<9}{row.text:<8}{row.answer:<24}{mark}"
        self._console.print(line, markup=False, soft_wrap=True)


@contextmanager
def showing(console: Console, tenants: Sequence[DemoTenant]) -> Iterator[View]:
    if not console.is_terminal:
        yield Lines(console)
        return
    panels = Panels(tenants)
    with Live(panels, console=console, refresh_per_second=REFRESHES_PER_S, vertical_overflow="crop"):
        yield panels
