"""`top`: what two statuses say, how keys sort it, and the screen in a real terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import pty
import struct
import sys
import termios
from fcntl import ioctl

from manylora.cli.interactive.top import Seen, View, screen
from manylora.client import Client, ClusterStatus
from rich.console import Console

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def status_of(address: str) -> ClusterStatus:
    async with Client(address) as client:
        return await client.status()


def served(status: ClusterStatus, tokens: int) -> ClusterStatus:
    flows = tuple(dataclasses.replace(flow, served_cost=flow.served_cost + tokens) for flow in status.scheduler.flows)
    return dataclasses.replace(status, scheduler=dataclasses.replace(status.scheduler, flows=flows))


async def test_rates_are_of_two_looks_of_one_term(address: str) -> None:
    first = await status_of(address)
    view, before = View(), Seen(first, 10.0)
    assert [row.values[1] for row in view.rows(before, None)] == [None] * len(view.rows(before, None))
    rows = {row.values[0]: row for row in view.rows(Seen(served(first, 300), 12.0), before)}
    assert rows["acme"].values[1:5] == (150.0, 1, 2, 1.5)
    assert rows["acme"].texts[1] == "150"
    fallen = view.rows(Seen(served(first, -1), 12.0), before)
    assert {row.values[0]: row.values[1] for row in fallen}["acme"] is None
    other_term = dataclasses.replace(first, scheduler=dataclasses.replace(first.scheduler, epoch=99))
    assert all(row.values[1] is None for row in view.rows(Seen(other_term, 12.0), before))


async def test_keys_choose_the_table_and_its_order(address: str) -> None:
    seen = Seen(await status_of(address), 1.0)
    view = View()
    view.press("<")
    names = [row.values[0] for row in view.rows(seen, None)]
    assert names == sorted(names, reverse=True)
    view.press("r")
    assert [row.values[0] for row in view.rows(seen, None)] == sorted(names)
    view.press("w")
    assert {row.values[0] for row in view.rows(seen, None)} == {worker.worker_id for worker in seen.status.workers}
    for _ in range(len(view.columns)):
        view.press(">")
        view.rows(seen, None)
    assert view.sorted_by == 1
    assert view.press("x")
    assert not view.press("q")


async def test_rows_that_do_not_fit_are_counted(address: str) -> None:
    seen = Seen(await status_of(address), 1.0)
    console = Console(width=120, height=7, record=True, file=io.StringIO())
    console.print(screen(View(), seen, None, lines=7, problem="UNAVAILABLE: gone"))
    shown = console.export_text()
    assert "UNAVAILABLE: gone" in shown
    assert f"{len(View().rows(seen, None)) - 1} more" in shown


async def test_it_draws_on_a_terminal_and_restores_it(address: str, router: FakeRouter) -> None:
    own, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    before = termios.tcgetattr(its)
    shown = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(own, lambda: shown.extend(os.read(own, 65536)))  # all the time: what writes to it waits else
    command = [sys.executable, "-m", "manylora", "top", "--interval", "0.2"]
    sized = {"COLUMNS": "120", "LINES": "30"}  # a test run in parallel has others, which go before the terminal's
    environment = {**os.environ, "MANYLORA_SERVER": address, "TERM": "xterm", **sized}
    process = await asyncio.create_subprocess_exec(*command, stdin=its, stdout=its, stderr=its, env=environment)
    try:
        async with asyncio.timeout(60):
            await appears(shown, b"weighted tokens/s v")
            assert b"acme" in shown
            os.write(own, b"w")
            await appears(shown, b"KV in use")
            os.write(own, b"\x03")
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(own)
    assert termios.tcgetattr(its) == before
    os.close(own)
    os.close(its)


async def appears(shown: bytearray, text: bytes) -> None:
    while text not in shown:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_without_a_terminal_it_names_the_other_command(manylora: Manylora) -> None:
    out = await manylora("top")
    assert out.exit_code == 2
    assert "`manylora status`" in out.stderr
