"""The clock that a scheduler left in etcd, as its lines before they are compressed, or as bytes."""

from __future__ import annotations

import zlib

from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.serving import clock_codec
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.queue_succession import restore, resume
from manylora_shared.ids import RequestId

from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    legacy = clock_codec.decode(zlib.compress(data, 1) if data[:1] == b"{" else data)
    for clock in legacy.clocks.values():
        queue: FairQueue[FlowKey, RequestId] = FairQueue()
        restore(queue, clock)
        resume(queue)
    again = clock_codec.decode(b"".join(clock_codec.encode(legacy)))
    assert {pool: clock.clock for pool, clock in again.clocks.items()} == (
        {pool: clock.clock for pool, clock in legacy.clocks.items()}
    )


HARNESS = Harness(run, documented=(ValueError,))
