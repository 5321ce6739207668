"""An asyncio event loop in which time is virtual and the order of events is a function of the seed.

Two runs of one seed are equal as long as the code takes time and randomness from here. A `SimNode` stands for one
process: a task created by one of its tasks is its own, and goes with it.
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextvars
import gc
import hashlib
import heapq
import math
import random
import threading
from asyncio import base_events, futures
from collections.abc import Callable, Coroutine, Generator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

_RESOLUTION_S = 1e-9
_KILL_ROUNDS = 100
_LISTED_TASKS = 20
_EVENTS_TO_END = 1_000_000
_CANCELLED_TIMERS_KEPT = 100
_NOTED_AT_ONCE = 8192  # events between two times that they go into the digest

# the timer of an asyncio.sleep: it only wakes the sleeper
_END_SLEEP: Any = futures._set_result_unless_cancelled  # type: ignore[attr-defined]

_NODE: contextvars.ContextVar[SimNode | None] = contextvars.ContextVar("sim_node", default=None)


class SimDeadlock(Exception):
    """Nothing is ready and no timer is set, but the main task has not ended."""


class SimLimit(Exception):
    """The run passed its bound of virtual time or of events."""


class _SimTask(asyncio.Task[T]):
    # its hash is the same in every run

    number: int

    def __hash__(self) -> int:
        return self.number


class _SimFuture(asyncio.Future[T]):
    # numbered when it is hashed first: hardly any ever is

    __slots__ = ("number",)

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            loop = self.get_loop()
            assert isinstance(loop, SimLoop)
            self.number: int = loop.next_number()
            return self.number


class _SimTimer(asyncio.TimerHandle):
    # without what asyncio's own keep for the debug mode

    __slots__ = ()
    _repr = _source_traceback = None

    def __init__(
        self, when: float, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None
    ) -> None:
        self._when = when
        self._scheduled = True
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]
            if self._scheduled:
                self._loop._timer_cancelled_count += 1  # type: ignore[attr-defined]


class _SimHandle(asyncio.Handle):
    __slots__ = ()
    _repr = _source_traceback = None

    def __init__(self, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


# when, its number, and either a timer or what arrives
_Timed = tuple[float, int, _SimTimer | None, Callable[[], None] | None]


class SimNode:
    """One incarnation of a simulated process: running, paused or dead. Cut it off from network and stores before
    `kill`: the `finally` blocks of its tasks still run.
    """

    def __init__(self, loop: SimLoop, name: str, number: int) -> None:
        self.name = name
        self.number = number  # of the name, in the loop's digest
        self._loop = loop
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._held: list[asyncio.Handle] = []
        self._paused = False
        self._dead = False
        self.is_still = False  # paused or dead: the loop asks `holds` before it runs a callback of the node

    @property
    def tasks(self) -> tuple[asyncio.Task[Any], ...]:
        return tuple(self._tasks)

    @property
    def is_dead(self) -> bool:
        return self._dead

    def start(self, main: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        assert not self._dead, f"{self.name} is dead"
        context = contextvars.copy_context()
        context.run(_NODE.set, self)
        return self._loop.create_task(main, context=context)

    def pause(self) -> None:
        self._paused = self.is_still = True

    def resume(self) -> None:
        self._paused, self.is_still = False, self._dead
        held, self._held = self._held, []
        self._loop.requeue(held)

    async def kill(self) -> None:
        """Cancels all tasks, waits for their end, and drops the callbacks that are left. Not called inside the node."""
        assert _NODE.get() is not self, "a node does not kill itself"
        self.resume()
        for _ in range(_KILL_ROUNDS):
            left = self.tasks
            if not left:
                break
            for task in left:
                if not task.cancelling():
                    task.cancel(f"{self.name} was killed")
            await asyncio.wait(left)
        else:
            raise RuntimeError(f"{self.name} goes on starting tasks: {[t.get_coro() for t in self.tasks]}")
        self._dead = self.is_still = True

    def holds(self, handle: asyncio.Handle) -> bool:
        """The loop must not run this callback of the node now."""
        if self._paused:
            self._held.append(handle)
        return self._paused or self._dead

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop, context=contextvars.Context())


class _VirtualSelector:
    # stands where the base loop keeps its selector; it is never asked

    def close(self) -> None:
        pass


# When nothing is ready the clock jumps to the next timer; without a timer the run is deadlocked. Callbacks that became
# ready in the same iteration run in an order drawn from the seed: asyncio promises an order only between iterations. A
# mere waking (the end of an asyncio.sleep, `arrive_at`) is no event. Tasks and futures hash by order of creation, and
# cycles are not collected during a run.
class SimLoop(base_events.BaseEventLoop):
    """Made and used by `run`.

    Args:
        limit_s: virtual seconds after which the run is over.
        max_events: callbacks after which it is over: a loop that never sleeps passes no virtual time.
    """

    def __init__(self, seed: int, *, limit_s: float = 3600.0, max_events: int = 20_000_000) -> None:
        super().__init__()
        base: Any = self  # the base loop's own queues, which its type stubs do not show
        base._selector = _VirtualSelector()
        base._clock_resolution = _RESOLUTION_S
        self._base = base
        self._closed: bool
        self._ready: collections.deque[asyncio.Handle] = base._ready
        self._scheduled: list[_Timed] = base._scheduled
        self._virtual_now = 0.0
        self._draw = random.Random(seed).random  # of the order of what is ready
        self._limit_s = limit_s
        self._max_events = max_events
        self._events = 0
        self._digest = hashlib.blake2b(digest_size=16)
        # not in the digest yet: each event's time, and the numbers of its node and of who it was
        self._noted: list[float] = []
        self._name_numbers: dict[str, int] = {}
        self._numbers = 0
        self._timers = 0
        self._thread = threading.get_ident()
        self.errors: list[dict[str, Any]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._record_error)

    # ---- for tests and the simulation

    @property
    def events(self) -> int:
        return self._events

    @property
    def digest(self) -> str:
        """Of every event so far: its virtual time and its source."""
        self._digest_noted()
        return self._digest.hexdigest()

    def trace(self, event: str) -> None:
        """Adds an event of the simulation's own to the digest."""
        self._digest_noted()
        self._digest.update(event.encode())

    def node(self, name: str) -> SimNode:
        return SimNode(self, name, self._number_of(name))

    def requeue(self, handles: Sequence[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def lift_limits(self) -> None:
        """For the end of a run, when its tasks are cancelled."""
        self._limit_s = math.inf
        self._max_events += _EVENTS_TO_END

    # ---- what asyncio asks of a loop

    def time(self) -> float:
        return self._virtual_now

    def create_future(self) -> asyncio.Future[Any]:
        return _SimFuture(loop=self)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            self._base._check_closed()
        handle = _SimHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            self._base._check_closed()
        timer = _SimTimer(when, callback, args, self, context)
        self._timers = number = self._timers + 1
        heapq.heappush(self._scheduled, (when, number, timer, None))
        return timer

    def arrive_at(self, when: float, arrive: Callable[[], None]) -> None:
        """`arrive` is called as the clock gets there, before the ready callbacks, in no node's context. It may only
        wake.
        """
        self._timers = number = self._timers + 1
        heapq.heappush(self._scheduled, (when, number, None, arrive))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._virtual_now + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a thread called into the simulation")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> NoReturn:
        raise RuntimeError("there are no threads in the simulation: put this work behind an interface")

    def _write_to_self(self) -> None:
        """Nobody waits in a selector."""

    def _process_events(self, event_list: Any) -> None:
        """There are no file descriptors."""

    def _run_once(self) -> None:
        base = self._base
        ready, scheduled = self._ready, self._scheduled
        while True:
            if base._timer_cancelled_count > _CANCELLED_TIMERS_KEPT:
                self._drop_cancelled()
            if not ready and not base._stopping:
                self._move_clock()
            # Never early: whoever is woken a hair before its time would wait for the rest, in which no time passes.
            now = self._virtual_now
            while scheduled and scheduled[0][0] <= now:
                self._pop_due()
            if len(ready) == 1:
                self._run_handle(ready[0])
                ready.popleft()
            elif ready:
                self._run_batch(ready)
            if base._stopping:
                return

    def _drop_cancelled(self) -> None:
        # once they are most of the timers
        scheduled = self._scheduled
        if self._base._timer_cancelled_count > len(scheduled) // 2:
            scheduled[:] = [timed for timed in scheduled if timed[2] is None or not timed[2]._cancelled]
            heapq.heapify(scheduled)
            self._base._timer_cancelled_count = 0

    def _move_clock(self) -> None:
        scheduled = self._scheduled
        while scheduled and (timer := scheduled[0][2]) is not None and timer._cancelled:
            self._pop_due()
        if not scheduled:
            raise SimDeadlock(f"at {self._virtual_now:.6f} s nothing can happen any more; {self._describe_tasks()}")
        when = scheduled[0][0]
        if when > self._virtual_now:
            self._virtual_now = when
        if self._virtual_now > self._limit_s:
            raise SimLimit(f"{self._limit_s:g} virtual seconds have passed; {self._describe_tasks()}")

    def _pop_due(self) -> None:
        _, _, timer, arrive = heapq.heappop(self._scheduled)
        if timer is None:
            assert arrive is not None
            arrive()
            return
        timer._scheduled = False
        if timer._cancelled:
            self._base._timer_cancelled_count -= 1
        elif timer._callback is _END_SLEEP:
            timer._callback(*timer._args)
        else:
            self._ready.append(timer)

    def _run_batch(self, ready: MutableSequence[Any]) -> None:
        batch = list(ready)
        ready.clear()
        # Fisher and Yates, as Random.shuffle, which takes longer: it makes up for what a float has too few bits for.
        draw = self._draw
        for last in range(len(batch) - 1, 0, -1):
            other = int(draw() * (last + 1))
            batch[last], batch[other] = batch[other], batch[last]
        try:
            while batch:
                self._run_handle(batch[-1])
                batch.pop()
        finally:
            ready.extend(batch)  # empty unless something was raised

    # ---- the inside

    def _run_handle(self, handle: Any) -> None:
        if handle._cancelled:
            return
        context, callback = handle._context, handle._callback
        node: SimNode | None = context.get(_NODE)
        if node is not None and node.is_still and node.holds(handle):
            return
        self._events += 1
        if self._events > self._max_events:
            raise SimLimit(f"{self._max_events} events at {self._virtual_now:.6f} s; {self._describe_tasks()}")
        owner = getattr(callback, "__self__", None)
        if type(owner) is _SimTask:
            who = owner.number
        else:
            who = -self._number_of(getattr(callback, "__qualname__", type(callback).__name__))
        noted = self._noted
        noted += (self._virtual_now, -1 if node is None else node.number, who)
        if len(noted) > 3 * _NOTED_AT_ONCE:
            self._digest_noted()
        try:
            context.run(callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # as asyncio's own handles do
            message = f"Exception in callback {getattr(callback, '__qualname__', callback)}"
            self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _digest_noted(self) -> None:
        self._digest.update(array.array("d", self._noted))
        self._noted.clear()

    def _number_of(self, name: str) -> int:
        number = self._name_numbers.get(name)
        if number is None:
            number = self._name_numbers[name] = len(self._name_numbers) + 1
            self._digest.update(name.encode())
        return number

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, main: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task: _SimTask[T] = _SimTask.__new__(_SimTask)
        task.number = self.next_number()
        options.setdefault("name", f"sim-{task.number}")
        context = options.get("context")
        node = _NODE.get() if context is None else context.get(_NODE)
        task.__init__(main, loop=self, **options)  # type: ignore[misc]
        if node is not None:
            node.add(task)
        return task

    def next_number(self) -> int:
        """Of a task or future, in order of creation (futures: of first use in a set)."""
        self._numbers += 1
        return self._numbers

    def _record_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def _describe_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"{task.get_name()} {task.get_coro()}" for task in tasks[:_LISTED_TASKS]]
        return f"{len(tasks)} tasks wait: " + "; ".join(lines)


class SimWallClock:
    """Follows a loop's virtual time and can be made to jump."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_unix_s: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._offset_s = start_unix_s

    def now_unix_s(self) -> float:
        return self._offset_s + self._loop.time()

    def jump(self, seconds: float) -> None:
        self._offset_s += seconds


@dataclass(frozen=True)
class SimRun(Generic[T]):
    result: T
    digest: str  # equal for equal runs, and hardly ever for others
    events: int
    virtual_s: float


def run(main: Coroutine[Any, Any, T], *, seed: int, limit_s: float = 3600.0, max_events: int = 20_000_000) -> SimRun[T]:
    """Ends the tasks that `main` leaves.

    Raises:
        SimDeadlock, SimLimit.
        ExceptionGroup: exceptions that no task or callback handled.
        Anything that `main` raises.
    """
    loop = SimLoop(seed, limit_s=limit_s, max_events=max_events)
    was_collecting = gc.isenabled()
    gc.disable()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        outcome = SimRun(result, loop.digest, loop.events, loop.time())
    finally:
        try:
            _end_tasks(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            if was_collecting:
                gc.enable()
    unhandled = [c["exception"] for c in loop.errors if isinstance(c.get("exception"), Exception)]
    unhandled += [RuntimeError(c["message"]) for c in loop.errors if not isinstance(c.get("exception"), Exception)]
    if unhandled:
        raise ExceptionGroup(f"unhandled in the run of seed {seed}", unhandled)
    return outcome


def _end_tasks(loop: SimLoop) -> None:
    loop.lift_limits()
    left = sorted(asyncio.all_tasks(loop), key=hash)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
