"""When the next step is begun: late, and in time for the device."""

from __future__ import annotations

import threading
from typing import cast

from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.loop import EngineLoop
from manylora_worker.hosting.runtime import Mailbox
from manylora_worker.kinds.api import StepBatch

STEP_S, BEGIN_S, WAKE_S, LOOK_S = 0.010, 0.002, 0.001, 0.0005


class Device:
    """Of an EngineCore what the loop asks for, over a device that takes STEP_S for each step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free_s: float | None = None  # when the step under way ends
        self.overestimated_s = 0.0
        self.idle_s = 0.0
        self.waited_s = 0.0  # of steps, for the device

    def next_step_s(self) -> float | None:
        return None if self.free_s is None or self.free_s <= self.now else self.free_s + self.overestimated_s

    def begin_step(self, now: float) -> StepBatch:
        self.now += BEGIN_S
        return StepBatch([])

    def submit(self, batch: StepBatch, now: float) -> None:
        free_s = now if self.free_s is None else self.free_s
        self.idle_s += max(0.0, now - free_s)
        self.waited_s += max(0.0, free_s - now)
        self.free_s = max(now, free_s) + STEP_S

    def turn(self, loop: EngineLoop) -> float:
        """A thread's, which wakes late. How long it rested."""
        began_s = self.now
        while (left_s := loop.rest_s()) > 0:
            self.now += min(left_s, LOOK_S)
        rest_s = self.now - began_s
        self.now += WAKE_S * (rest_s > 0)
        loop.begin(())
        assert self.free_s is not None
        self.now = max(self.now, self.free_s - STEP_S)  # the one before is through
        return rest_s


def test_a_step_is_begun_just_before_the_device_needs_it() -> None:
    device = Device()
    loop = EngineLoop(cast(EngineCore, device), lambda: device.now, lambda post: None)
    assert device.turn(loop) == 0.0, "nothing is under way"
    for _ in range(20):
        assert device.turn(loop) > 0
    device.idle_s = device.waited_s = 0.0
    rests = [device.turn(loop) for _ in range(20)]
    assert device.idle_s == 0.0
    assert device.waited_s < 20 * (0.25 * STEP_S)
    assert min(rests) > STEP_S - BEGIN_S - WAKE_S - 0.25 * STEP_S


def test_a_device_that_is_free_is_not_kept_waiting() -> None:
    """However wrong the time is that its step was expected to take."""
    device = Device()
    loop = EngineLoop(cast(EngineCore, device), lambda: device.now, lambda post: None)
    device.turn(loop)
    device.overestimated_s = 60.0
    for _ in range(20):
        device.turn(loop)
    assert device.idle_s < 21 * (LOOK_S + WAKE_S + BEGIN_S)
    device.now += 5.0
    assert loop.rest_s() == 0.0


def test_what_comes_ends_no_rest_but_the_end_does() -> None:
    mailbox = Mailbox()
    mailbox.send(lambda core, now: None)
    mailbox.wake()
    left = [0.001, 0.001, 0.0]
    mailbox.rest(lambda: left.pop(0))
    assert not left
    resting = threading.Thread(target=mailbox.rest, args=(lambda: 3600.0,), daemon=True)
    resting.start()
    mailbox.stop()
    resting.join(60.0)
    assert not resting.is_alive()
    commands, is_stopping = mailbox.take()
    assert len(commands) == 1
    assert is_stopping
