"""A rank other than 0: `python -m manylora_worker.models.ranks.follower SOCKET_FD`, started by followers.py.

Does what rank 0 tells, in order, on one thread, with a runner and a backend of its own. Ends with its socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.telemetry import logs

from manylora_worker.kinds.api import AheadRunner, AheadStep, SwapRunner
from manylora_worker.models.build import build_rank
from manylora_worker.models.layers.host_kv import TensorCopy, TensorHostKv
from manylora_worker.models.parts import EngineParts
from manylora_worker.models.ranks.followers import Order
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.plans import Plan, PlanReader
from manylora_worker.weights.backend import TorchAdapterBackend
from manylora_worker.weights.reader_process import end_with_parent


class _Line:
    """To rank 0, from the one thread but for `wake`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def wake(self) -> None:
        """From any thread: `hear` returns None once."""
        with contextlib.suppress(BlockingIOError):  # so many wakes are not read yet that one more is none
            os.write(self._waker, b"+")

    def say(self, **message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def hear(self) -> Any:
        """Raises EOFError or ConnectionError where rank 0 has ended."""
        ready = wait([self._connection, self._woken])
        if self._woken in ready:
            os.read(self._woken, 1 << 12)
            return None
        return pickle.loads(self._connection.recv_bytes())


class _Follower:
    def __init__(self, line: _Line, parts: EngineParts) -> None:
        assert isinstance(parts.runner, SwapRunner)
        assert isinstance(parts.runner.host_kv, TensorHostKv)
        assert isinstance(parts.backend, TorchAdapterBackend)
        self._line = line
        self._runner = parts.runner
        self._backend = parts.backend
        self._plans = PlanReader()
        self._host_kv = parts.runner.host_kv
        self._copies: dict[int, TensorCopy] = {}
        self._step: AheadStep | None = None  # the newest

    def serve(self) -> NoReturn:
        while True:
            message = self._line.hear()
            if message is None:
                self._tell_news()
            else:
                name, *arguments = message
                getattr(self, f"_do_{name}")(*arguments)

    def _tell_news(self) -> None:
        for event in self._backend.poll():
            self._line.say(
                uid=event.uid,
                tier=int(event.tier),
                size_bytes=event.size_bytes,
                error=event.error,
                is_passing=event.is_passing,
            )

    def _do_step(self, plan: Plan) -> None:
        batch = self._plans.read(plan)
        if isinstance(self._runner, AheadRunner):
            self._step = self._runner.submit(batch)  # rank 0 waits for what is drawn
        else:
            self._runner.execute(batch)

    def _do_draw(self, masks: Mapping[int, bytes]) -> None:
        assert self._step is not None
        self._step.draw(masks)

    def _do_copy_out(self, number: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copies[number] = self._host_kv.copy_out(sources, targets)

    def _do_copy_in(self, number: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copies[number] = self._host_kv.copy_in(sources, targets)

    def _do_copied(self, number: int) -> None:
        """Later steps may use the blocks."""
        self._copies.pop(number).go_before_steps()

    def _do_start_host_load(self, uid: AdapterUid, lent: str | None) -> None:
        self._backend.start_host_load(uid, lent)

    def _do_start_device_load(self, uid: AdapterUid) -> None:
        self._backend.start_device_load(uid)

    def _do_drop_device(self, uid: AdapterUid) -> None:
        self._backend.drop_device(uid)

    def _do_drop_host(self, uid: AdapterUid) -> None:
        self._backend.drop_host(uid)


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for rank 0, which may drain
    end_with_parent()
    line = _Line(Connection(int(sys.argv[1])))
    try:
        order: Order = line.hear()
        config = order.config
        logs.setup("worker", config.log_level, instance_id=f"rank-{order.rank}")
        group = RankGroup(order.rank, config.tensor_parallel, torch.device(config.device), order.store)
        parts = build_rank(config, group, line.wake)
        if parts.keyring is not None:
            parts.keyring.start_apart(lambda: config.etcd_store()[0])
        line.say(ready=True)
        _Follower(line, parts).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # rank 0 has ended, or wants no more of this one
    except BaseException as error:
        traceback.print_exc()
        line.say(failed=f"{type(error).__name__}: {error}")
        os._exit(1)  # in order it would wait for the other ranks


if __name__ == "__main__":
    main()
