"""Who is of the pool, and what is said of who is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from manylora_shared.coordination.pool import MAX_POOLS, kept_out
from manylora_shared.coordination.records import WorkerRecord

WORKER = WorkerRecord(
    worker_id="w0", address="127.0.0.1:1", device="cpu", model_name="m", model_digest="a" * 64, vocab_size=10,
    max_context_tokens=9, sequence_slots=1, max_lora_rank=8, dtype="float32", quantization="none", started_unix_s=5.0,
)  # fmt: skip


def pool(*changes: dict[str, Any]) -> dict[str, WorkerRecord]:
    workers = {f"w{i}": dataclasses.replace(WORKER, worker_id=f"w{i}", **each) for i, each in enumerate(changes)}
    return dict(reversed(workers.items()))


def test_workers_that_compute_the_same_are_one_pool() -> None:
    assert kept_out({}) == {}
    assert kept_out(pool({}, {"device": "cuda", "sequence_slots": 7, "started_unix_s": 1.0}, {"model_name": "n"})) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_digest": "b" * 64}, "base model m (bbbbbbbbbbbb), the pool's is m (aaaaaaaaaaaa)"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, the pool's is float32"),
        ({"quantization": "nf4"}, "quantization nf4, the pool's is none"),
        ({"rotation": "longrope"}, "rotation longrope, the pool's is the model's own"),
        ({"protocol": 2}, "protocol 2, the pool's is 1"),
        ({"quantization": ""}, "quantization not told, the pool's is none"),
    ],
)
def test_who_differs_from_the_first_is_kept_out(change: dict[str, Any], said: str) -> None:
    later = {**change, "started_unix_s": 6.0}
    assert kept_out(pool({}, later, later)) == dict.fromkeys(["w1", "w2"], f"it does not compute what w0 does: {said}")
    assert set(kept_out(pool({}, change))) == {"w1"}, "in one moment: by their ids"
    assert set(kept_out(pool({}, {**change, "started_unix_s": 4.0}))) == {"w0"}
    assert kept_out(pool({}, {**change, "pool": "other"})) == {}, "each pool has its own first worker"


@pytest.mark.parametrize(
    "change", [{"model_digest": "b" * 64}, {"dtype": "x"}, {"quantization": "nf4"}, {"rotation": "l"}]
)
def test_what_computes_otherwise_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert dataclasses.replace(WORKER, **change).fingerprint != WORKER.fingerprint
    assert dataclasses.replace(WORKER, worker_id="w1", protocol=2).fingerprint == WORKER.fingerprint


def test_there_are_so_many_pools_and_no_more() -> None:
    many = [{"pool": f"p{i}", "started_unix_s": float(i)} for i in range(MAX_POOLS + 2)]
    assert list(kept_out(pool(*many))) == [f"w{MAX_POOLS}", f"w{MAX_POOLS + 1}"]
    assert "there are 64 pools already, and p64 is none of them" in kept_out(pool(*many))[f"w{MAX_POOLS}"]


def test_a_pools_name_is_one() -> None:
    with pytest.raises(ValueError, match=r"WorkerRecord\.pool: has ' '"):
        dataclasses.replace(WORKER, pool="a b")
