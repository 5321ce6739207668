"""What a leader leaves to the next one, as bytes: compressed lines of JSON. Pure; owns the form.

    {"clock": V}
    {"flows": [[tenant, class, weight, settled tag, had queued requests], ...]}   weight 0: only its counters are known
    {"reserved": [[request id, flow, what is left of its reservation], ...]}
    {"counted": {worker: [[flow, cost], ...], ...}}
    {"settled": [[flow, tokens], ...]}
    {"pool": name}   what follows is of this pool, with flows of its own; before the first: of the default one

in any number and order, but flows are named before others mention them, by their place among all flows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from manylora_shared.coordination.pool import MAX_POOLS
from manylora_shared.fairness.queue_succession import FlowSnapshot, Snapshot
from manylora_shared.ids import DEFAULT_POOL, QosClass, RequestId, TenantId, name_problem

from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.core.succession import ClockSnapshot

ENTRIES_PER_STEP = 1000
MAX_BYTES = 1 << 28  # before they are compressed: of some millions of flows
_MAX_WHOLE = 1 << 128


class Legacy(NamedTuple):
    clocks: Mapping[str, ClockSnapshot]  # by pool; the default one is always there
    settled: Mapping[FlowKey, int]  # tokens that flows were charged since there is a cluster


def encode(legacy: Legacy) -> Iterator[bytes]:
    """In steps of at most some milliseconds; a step may have no bytes."""
    compress = zlib.compressobj(level=1)

    def line(name: str, value: object) -> bytes:
        return compress.compress(json.dumps({name: value}, separators=(",", ":")).encode() + b"\n")

    yield from _encode_pool(legacy.clocks[DEFAULT_POOL], legacy.settled, line)
    for pool, snapshot in legacy.clocks.items():
        if pool != DEFAULT_POOL:
            yield line("pool", pool)
            yield from _encode_pool(snapshot, {}, line)
    yield compress.flush()


def _encode_pool(
    snapshot: ClockSnapshot, settled: Mapping[FlowKey, int], line: Callable[[str, object], bytes]
) -> Iterator[bytes]:
    index: dict[FlowKey, int] = {}

    def named(flow: FlowKey, unnamed: list[tuple[object, ...]]) -> int:
        found = index.get(flow)
        if found is None:
            found = index[flow] = len(index)
            unnamed.append((flow.tenant_id, flow.qos_class.value, 0, 0, False))
        return found

    def of_flows(name: str, totals: Mapping[FlowKey, int], owner: str | None = None) -> Iterator[bytes]:
        for step in _steps(iter(totals.items())) if totals or owner is None else [[]]:
            unnamed: list[tuple[object, ...]] = []
            values = [(named(flow, unnamed), total) for flow, total in step]
            told = line("flows", unnamed) if unnamed else b""
            yield told + line(name, values if owner is None else {owner: values})

    yield line("clock", snapshot.clock)
    for known in _steps(iter(snapshot.flows)):
        for entry in known:
            index[entry.flow] = len(index)
        yield line("flows", [(f.tenant_id, f.qos_class.value, w, settled, queued) for f, w, settled, queued in known])
    for left in _steps(iter(snapshot.reserved)):
        unnamed: list[tuple[object, ...]] = []
        values = [(request_id, named(flow, unnamed), cost) for request_id, flow, cost in left]
        yield line("flows", unnamed) + line("reserved", values)
    for worker_id, counted in snapshot.counted.items():
        yield from of_flows("counted", counted, worker_id)
    yield from of_flows("settled", settled)


class _Section:
    """Of one pool."""

    def __init__(self) -> None:
        self._clock: int | None = None
        self._flows: list[FlowKey] = []
        self._known: list[FlowSnapshot[FlowKey]] = []
        self._reserved: list[tuple[RequestId, FlowKey, int]] = []
        self._counted: dict[str, dict[FlowKey, int]] = {}
        self.settled: dict[FlowKey, int] = {}

    def take(self, name: str, value: Any) -> None:
        flows = self._flows
        match name:
            case "clock":
                self._clock = _whole(value)
            case "flows":
                for tenant, qos_class, weight, tag, queued in value:
                    flow = FlowKey(TenantId(str(tenant)), QosClass(qos_class))
                    flows.append(flow)
                    if weight:
                        self._known.append(FlowSnapshot(flow, _whole(weight), _tag(tag), bool(queued)))
            case "reserved":
                self._reserved += [(RequestId(str(r)), _flow(flows, i), _whole(left)) for r, i, left in value]
            case "counted":
                for worker_id, totals in value.items():
                    of_worker = self._counted.setdefault(worker_id, {})
                    of_worker.update((_flow(flows, i), _whole(total)) for i, total in totals)
            case "settled":
                self.settled.update((_flow(flows, i), _whole(total)) for i, total in value)
            case other:
                raise ValueError(f"{other} is not known")

    def snapshot(self) -> ClockSnapshot:
        if self._clock is None:
            raise ValueError("this is no clock: it has no time")
        return Snapshot(self._clock, tuple(self._known), tuple(self._reserved), self._counted)


def decode(data: bytes) -> Legacy:
    """Raises ValueError."""
    sections = {DEFAULT_POOL: (section := _Section())}
    try:
        for text in _decompressed(data).splitlines():
            ((name, value),) = json.loads(text).items()
            if name != "pool":
                section.take(name, value)
                continue
            if not isinstance(value, str) or name_problem(value) or value in sections or len(sections) > MAX_POOLS:
                raise ValueError(f"{str(value)[:40]} is no further pool")
            section = sections[value] = _Section()
    except (zlib.error, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise ValueError(f"this is no clock: {e}") from e
    clocks = {pool: section.snapshot() for pool, section in sections.items()}
    return Legacy(clocks, sections[DEFAULT_POOL].settled)


def _decompressed(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, MAX_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"it is cut short, or has more than {MAX_BYTES} bytes")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_WHOLE:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _tag(value: Any) -> int:
    """Below 0 where a flow's weight fell while much was reserved for it: its tag stayed."""
    return -_whole(-value) if type(value) is int and value < 0 else _whole(value)


def _flow(flows: list[FlowKey], index: int) -> FlowKey:
    if index < 0:
        raise ValueError("a flow is not named")
    return flows[index]


def _steps(entries: Iterator[Any]) -> Iterator[list[Any]]:
    while step := list(islice(entries, ENTRIES_PER_STEP)):
        yield step
