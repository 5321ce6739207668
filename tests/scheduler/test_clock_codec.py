"""The clock in bytes and back."""

from __future__ import annotations

import random
import zlib

import pytest
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.serving import clock_codec
from manylora_scheduler.serving.clock_codec import Legacy, decode, encode
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.queue_succession import FlowSnapshot, Snapshot, take_snapshot
from manylora_shared.fairness.seam import Share
from manylora_shared.ids import DEFAULT_POOL, QosClass, RequestId

from tests.scheduler.helpers import flow


def some_legacy(seed: int) -> Legacy:
    rng = random.Random(seed)
    flows = [flow(f"t{i}", rng.choice(list(QosClass))) for i in range(rng.randrange(40))]
    known = [FlowSnapshot(f, rng.randint(1, 9), rng.getrandbits(70), rng.random() < 0.5) for f in flows[::2]]
    reserved = [(RequestId(f"r{i}"), rng.choice(flows), rng.randrange(1000)) for i in range(rng.randrange(9)) if flows]
    counted = {f"w{i}": {f: rng.randrange(10**9) for f in flows if rng.random() < 0.5} for i in range(3)}
    settled = {f: rng.randrange(1, 10**9) for f in flows if rng.random() < 0.5}
    snapshot = Snapshot(rng.getrandbits(70), tuple(known), tuple(reserved), counted)
    return Legacy({DEFAULT_POOL: snapshot}, settled)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_clock_comes_back_from_its_bytes(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(clock_codec, "ENTRIES_PER_STEP", step)
    for seed in range(40):
        legacy = some_legacy(seed)
        assert decode(b"".join(encode(legacy))) == legacy
        several = Legacy({**legacy.clocks, "small": some_legacy(seed + 1).clocks[DEFAULT_POOL]}, legacy.settled)
        assert decode(b"".join(encode(several))) == several


def test_a_flow_whose_weight_fell_under_its_reservations_comes_back() -> None:
    """Seed 282 of the simulation: the next leader read no clock at all."""
    queue: FairQueue[FlowKey, str] = FairQueue()
    queue.adopt("r", flow("t"), share=Share(8), reserve=100)
    queue.set_share(flow("t"), Share(1))
    taken = take_snapshot(queue)
    assert taken.flows[0].settled < 0
    legacy = Legacy({DEFAULT_POOL: Snapshot(taken.clock, taken.flows, (), {})}, {})
    assert decode(b"".join(encode(legacy))) == legacy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "null",
        "[1]",
        '{"flows":[]}',
        '{"clock":1,"flows":[]}',
        '{"clock":1}\n{"reserved":[["r",0,1]]}',
        '{"clock":1}\n{"flows":[["t","batch",1,1,true]]}\n{"reserved":[["r",-1,1]]}',
        '{"clock":1}\n{"flows":[["t","no",1,1,true]]}',
        '{"clock":1}\n{"counted":[]}',
        '{"clock":1e999}',
        '{"clock":1.5}',
        '{"clock":-1}',
        '{"clock":true}',
        '{"clock":1}\n{"flows":[["t","batch",-1,1,true]]}',
        '{"clock":1}\n{"flows":[["t","batch",1,1e999,true]]}',
        '{"clock":' + "[" * 100_000,
        '{"clock":1}\n{"settled":[[0,1]]}',
        '{"clock":1}\n{"more":[]}',
        '{"clock":1}\n{"pool":"a"}',
        '{"clock":1}\n{"pool":"a b"}\n{"clock":1}',
        '{"clock":1}\n{"pool":"default"}\n{"clock":1}',
        '{"clock":1}\n{"pool":["a"]}\n{"clock":1}',
    ],
)
def test_what_is_no_clock_is_refused(text: str) -> None:
    for data in (text.encode(), zlib.compress(text.encode())):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(data)


def test_a_clock_is_not_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"".join(encode(some_legacy(1)))
    monkeypatch.setattr(clock_codec, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        decode(whole)
    with pytest.raises(ValueError, match="cut short"):
        decode(whole[:-5])
