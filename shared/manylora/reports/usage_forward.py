"""What `manylora usage forward` does."""

from __future__ import annotations

import asyncio
import logging
import signal

from manylora_shared.ledger_sinks.opening import open_forwarder

from manylora.cli.output import usage_error, write


async def forward(source: str, place: str, *, until_empty: bool) -> None:
    """Until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        forwarder = open_forwarder(place, source)
    except (OSError, ValueError) as error:
        raise usage_error(str(error)) from None
    task = asyncio.ensure_future(forwarder.run(until_empty=until_empty))
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        await asyncio.to_thread(forwarder.close)
    write(f"{forwarder.rows} rows forwarded\n")
