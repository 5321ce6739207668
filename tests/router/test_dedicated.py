"""Whether a pool has enough workers for what policies dedicate."""

from __future__ import annotations

import pytest
from manylora_router.admin.dedicated import dedicated_problem
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.ids import AdapterName, TenantId
from manylora_shared.tenancy.policy import TenantPolicy, parse_policy


def policy(tenant: str, dedicated: str, pools: str = "[default]") -> TenantPolicy:
    return parse_policy(f"tenant_id: {tenant}\npools: {pools}\nadapters: {{dedicated: {dedicated}}}\n")


def worker(name: str, problem: str = "") -> WorkerRecord:
    return WorkerRecord(
        worker_id=name, address="127.0.0.1:1", device="cpu", model_name="m", model_digest="a" * 64, vocab_size=10,
        max_context_tokens=9, sequence_slots=1, max_lora_rank=8, merge_problem=problem,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "others", "able", "unable", "said"),
    [
        ("{x: 1}", [], 2, 0, None),
        ("{x: 2}", [], 2, 0, "asks for 2 dedicated workers of pool default: it has 2"),
        ("{x: 1, y: 1}", [], 2, 0, "asks for 2 dedicated"),
        ("{x: 1}", ["{z: 1}"], 2, 0, "and other tenants' policies for 1"),
        ("{x: 1}", ["{z: 1}"], 3, 0, None),
        ("{x: 1}", [], 0, 2, "of which 0 can merge an adapter (n0: it is quantized)"),
        ("{x: 1}", [], 1, 1, None),
        ("{x: 9}", [], 0, 0, None),
    ],
)
def test_a_pool_has_so_many(wanted: str, others: list[str], able: int, unable: int, said: str | None) -> None:
    workers = [worker(f"w{i}") for i in range(able)] + [worker(f"n{i}", "it is quantized") for i in range(unable)]
    own, rest = policy("a", wanted), [policy(f"t{i}", each) for i, each in enumerate(others)]
    problem = dedicated_problem(own, rest, {}, {"default": workers})
    assert problem is None if said is None else said in (problem or "")


def test_each_pool_counts_by_itself() -> None:
    own = policy("a", "{x: 1, y: 1}", "[default, small]")
    pools = {"default": [worker("w0"), worker("w1")], "small": [worker("s0")]}
    pool_of = {(TenantId("a"), AdapterName("y")): "small"}
    assert "pool small: it has 1" in (dedicated_problem(own, [], pool_of, pools) or "")
    pools["small"].append(worker("s1"))
    assert dedicated_problem(own, [], pool_of, pools) is None
