"""Two GPUs share a model: as one, for every family that can be shared, whatever the engine does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.numerics.adapters import FP8_SLACK
from tests.numerics.conftest import KV_IN_FP8, FamilyOf
from tests.numerics.two_ranks import SHARED_FAMILIES, check_fight, check_logprobs, shared_by_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("name", SHARED_FAMILIES)
def test_logprobs_are_the_references(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_logprobs(family_of(name), tmp_path, "cuda", 1e-3)


def test_logprobs_of_kv_in_fp8(family_of: FamilyOf, tmp_path: Path) -> None:
    check_logprobs(family_of("llama" + KV_IN_FP8), tmp_path, "cuda", FP8_SLACK, block_size=64)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_outputs_are_the_references_whatever_befalls(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_fight(family_of(name), tmp_path, "cuda")


_PROGRAM = """
import json, sys, time
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.models.build import build_engine
from manylora_shared.ids import QosClass, RequestId, TenantId

config = WorkerConfig(model=sys.argv[1], device="cuda", dtype="float32", threads=1, num_blocks=36, sequence_slots=4,
                      max_batch_tokens=48, tensor_parallel=2, device_adapter_mb=1.0)
parts = build_engine(config)
core = EngineCore(parts.runner, parts.backend, engine_limits(config))
print(json.dumps(parts.backend._followers._ranks[0][1].pid), flush=True)
while True:
    if not core.has_work():
        core.add(EngineRequest(RequestId(str(time.monotonic())), TenantId("t"), QosClass("batch"), None, (5, 6, 7), 100,
                               Sampling(temperature=0.0)), time.monotonic())
    core.step(time.monotonic())
    core.take_ended()
"""


def test_a_lost_rank_ends_the_process(family_of: FamilyOf, tmp_path: Path) -> None:
    """It is killed in the midst of steps, so the other's device waits for a sum that never comes."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), str(family_of("llama").folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    pid = json.loads(process.stdout.readline())
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"rank 1 (process {pid}) has ended by signal 9" in said


def test_two_ranks_of_bfloat16_hold_half_of_it_each(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    with shared_by_two(family, tmp_path, "cuda", dtype="bfloat16") as parts:
        kv = parts.runner._own._cache.geometry  # type: ignore[attr-defined]
        assert kv.num_kv_heads == family.loaded.spec.kv.num_kv_heads // 2
