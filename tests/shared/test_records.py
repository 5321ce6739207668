"""What stands behind the store's keys: what is no record is refused with ValueError, whatever it is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue
from manylora_shared.coordination.records import (
    AdapterRecord,
    ClockIndexRecord,
    KeyRecord,
    RouterRecord,
    SchedulerRecord,
    WorkerRecord,
)

WORKER = WorkerRecord("w", "127.0.0.1:1", "cpu", "m", "d", 10, 100, 2, 8, eos_token_ids=(1, 2))
DIALLED = [WORKER, RouterRecord("r", "[::1]:2"), SchedulerRecord("s", "host:3")]
RECORDS = [
    *DIALLED,
    AdapterRecord("acme", "json", "ab", 8, 5 << 40, ("q_proj",), 1.5),
    ClockIndexRecord(1, 2, 3),
    KeyRecord("00", "ff", "acme", ("admin",), "Ä", 2, 3.0),
]
WRONG: list[Any] = [None, True, {}, {"a": 1}, [None], [[]], [[1]], "\ud800", ["\ud800"], 10**400, float("nan")]


@pytest.mark.parametrize("record", DIALLED, ids=lambda record: type(record).__name__)
def test_who_is_dialled_has_an_address(record: Any) -> None:
    kind = type(record)
    assert kind.from_json(record.to_json()) == record
    wrong = json.dumps({**dataclasses.asdict(record), "address": "host"})
    with pytest.raises(ValueError, match="address 'host': host:port is expected"):
        kind.from_json(wrong.encode())


def test_a_neighbouring_versions_record_can_be_read() -> None:
    values = dataclasses.asdict(WORKER)
    newer = json.dumps({**values, "colour": "red"})
    assert WorkerRecord.from_json(newer.encode()) == WORKER
    del values["device_adapter_bytes"]
    assert WorkerRecord.from_json(json.dumps(values).encode()) == WORKER


def test_a_large_models_record_can_be_read() -> None:
    """Llama 3.1's 405B: parameters beyond 32 bits."""
    large = dataclasses.replace(
        WORKER, layer_parameters=401_000_000_000, head_parameters=16384 * 128_256, attention_operations=4 * 126 * 16384
    )
    assert WorkerRecord.from_json(large.to_json()) == large


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000, b"9" * 9_999])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's and codecs' own are among them
        WorkerRecord.from_json(data)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_field_of_another_type_is_refused_by_name(record: Any) -> None:
    kind, values = type(record), dataclasses.asdict(record)
    assert kind.from_json(record.to_json()) == record
    for name, right in values.items():
        more: list[Any] = [7, 1.5] if isinstance(right, str) else ["7", 7] if isinstance(right, tuple) else ["7"]
        if isinstance(right, int) and not name.endswith("_s"):
            more += [-1, 1 << 64, 1.0]
        wrongs = (
            [each for each in WRONG if not isinstance(each, dict)] + [[], {"a": "b"}]
            if isinstance(right, dict)
            else WRONG + more
        )
        for wrong in (each for each in wrongs if not (isinstance(right, bool) and each is True)):
            data = json.dumps({**values, name: wrong}).encode()
            with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name}(\[0\]|\.a)?: must be "):
                kind.from_json(data)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_under_anothers_key_is_refused(record: Any) -> None:
    kv = KeyValue(record.key, record.to_json(), 1, 1, 1)
    assert kv.key.startswith(keys.ROOT)
    assert type(record).stored(kv) == record
    with pytest.raises(ValueError, match=f"it is the record of {record.key}"):
        type(record).stored(dataclasses.replace(kv, key=record.key + "x"))
