"""A record of any kind in etcd, by itself, and in the eyes of a router that must serve on."""

from __future__ import annotations

import json

from manylora_shared.coordination import keys, records
from manylora_shared.coordination.base import KeyValue

from tests.fuzz.harness import Harness
from tests.fuzz.router import serves_beside

_KINDS = {
    keys.WORKERS: records.WorkerRecord,
    keys.ROUTERS: records.RouterRecord,
    keys.SCHEDULER_LEADER: records.SchedulerRecord,
    keys.ADAPTERS: records.AdapterRecord,
    keys.API_KEYS: records.KeyRecord,
    keys.SCHEDULER_CLOCK: records.ClockIndexRecord,
}
_FOREIGN = (
    keys.WORKERS + "x-",
    keys.ROUTERS + "x-",
    keys.ADAPTERS + "acme/x-",
    keys.API_KEYS + "x-",
    keys.TENANTS + "x-",
)


def run(data: bytes) -> None:
    """{"key": "...", "value": any document, or its text}"""
    try:
        given = json.loads(data)
        key, value = given["key"], given["value"]
        if not isinstance(key, str) or len(key) > 200 or not key.isprintable():
            return
        stored = (value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    for prefix, kind in _KINDS.items():
        if key.startswith(prefix):
            try:
                record = kind.stored(KeyValue(key, stored, 1, 1, 1, 0))
            except ValueError:
                continue
            assert kind.from_json(record.to_json()) == record
    # what stands under the names of those that a router needs would take their place rightly
    if key.startswith(_FOREIGN):
        serves_beside(key, stored)


HARNESS = Harness(run, is_json=True)
