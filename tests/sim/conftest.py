"""The table of what the mutation gate found, at the end of a run that played it."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = sorted(
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "mutant"
    )
    if rows:
        terminalreporter.section("mutants and the seeds that kill them")
    for kind, name, seed, played, cpu_s, why in rows:
        terminalreporter.write_line(f"{kind:12} {name:42} seed {seed:3} ({played} played, {cpu_s} s)  {why}")
