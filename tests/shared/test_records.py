"""What stands behind the store's keys: what is no record is refused with ValueError, whatever it is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from manylora_shared.coordination.records import RouterRecord, SchedulerRecord, WorkerRecord

WORKER = WorkerRecord("w", "127.0.0.1:1", "cpu", "m", "d", 10, 100, 2, 8, eos_token_ids=(1, 2))
DIALLED = [WORKER, RouterRecord("r", "[::1]:2"), SchedulerRecord("s", "host:3")]


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


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"{}", b"\xff"])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's and codecs' own are among them
        WorkerRecord.from_json(data)
