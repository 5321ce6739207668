from __future__ import annotations

import asyncio
import io

import pytest
from manylora.load import view
from manylora.load.planning.mix import mix_of
from manylora.load.run import Run
from rich.console import Console


def a_run() -> Run:
    document = {"duration_s": 9, "arrivals": {"rate": 1}, "tenants": {"acme": {}, "t{n}": {"count": 30}}}
    run = Run(mix_of(document, lambda name: ()), None, max_running=9, drain_s=1)  # type: ignore[arg-type]
    for tally in (run.tallies["acme"], run.total):
        tally.completed, tally.output_tokens = 12, 340
        tally.ttft.add(0.05)
        tally.errors["429 overloaded"] += 2
    return run


def test_a_screen_names_the_busiest_and_counts_the_rest() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(view.screen(a_run(), 123.0))
    shown = console.export_text()
    first = next(line for line in shown.splitlines() if line.lstrip().startswith("acme"))
    assert {"12", "340", "ms"} <= set(first.split())
    assert "429 overloaded" in first
    assert "11 more" in shown
    assert "12 done   2 failed   123 tokens/s" in shown


async def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_LINE_S", 0.01)
    async with view.shown(a_run()):
        await asyncio.sleep(0.1)
    assert "12 done" in capsys.readouterr().err
