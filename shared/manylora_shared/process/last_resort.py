"""Ends the process from outside the interpreter, with every thread's stack on stderr, where nothing inside it can: its
event loop stands still, or its end hangs on a device.
"""

from __future__ import annotations

import asyncio
import faulthandler

SILENCE_S = 20.0
_BEAT_S = 1.0
_END_S = 10.0


class LastResort:
    """One in a process. silence_s: the event loop may stand still for so long, by a clock that stops while the machine
    sleeps; 0: for ever."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._silence_s:
            faulthandler.dump_traceback_later(self._silence_s, exit=True)
            self._beat = asyncio.get_running_loop().call_later(_BEAT_S, self.start)

    def end_soon(self) -> None:
        """Whatever hangs."""
        if self._beat is not None:
            self._beat.cancel()
        faulthandler.dump_traceback_later(_END_S, exit=True)
