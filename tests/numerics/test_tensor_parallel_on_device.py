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
from manylora_worker.models.loader import load_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.numerics.adapters import FP8_SLACK, Reference, recipes, save_adapter
from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.families import VOCAB_SIZE
from tests.numerics.mixtures import OWN_PATTERNS
from tests.numerics.quantizing import shipped_family
from tests.numerics.two_ranks import (
    SHARED_FAMILIES,
    SHARED_MIXTURES,
    check_fight,
    check_first_logprobs,
    check_logprobs,
    mixture_family,
    mixture_in_nf4,
    shared_by_two,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.own_process,  # which can share a model by GPUs once
]


@pytest.mark.parametrize("name", SHARED_FAMILIES)
def test_logprobs_are_the_references(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_logprobs(family_of(name), tmp_path, "cuda", 1e-3)


@OWN_PATTERNS
@pytest.mark.parametrize("name", SHARED_MIXTURES)
def test_logprobs_of_a_mixture_are_the_references(name: str, tmp_path: Path) -> None:
    check_logprobs(mixture_family(tmp_path / "made", name), tmp_path, "cuda", 1e-3, block_size=64)  # of one layer's KV


@OWN_PATTERNS
def test_logprobs_of_a_mixture_in_fp8_are_the_references(tmp_path: Path) -> None:
    family = mixture_family(tmp_path / "made", quantization="fp8")
    check_logprobs(family, tmp_path, "cuda", 1e-3, quantization="fp8")


def test_logprobs_of_kv_in_fp8(family_of: FamilyOf, tmp_path: Path) -> None:
    check_logprobs(family_of("llama" + KV_IN_FP8), tmp_path, "cuda", FP8_SLACK, block_size=64)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_wide"])
def test_outputs_are_the_references_whatever_befalls(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_fight(family_of(name), tmp_path, "cuda")


def wide_family(folder: Path) -> Family:
    """Whose halves are whole groups of 64 inputs."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "tiny-llama")
    model.name_or_path = "someone/tiny-llama"
    adapters = {
        name: save_adapter(model, folder / name, seed, **recipes("llama")[name])
        for seed, name in enumerate(("all-linear", "all-linear-b", "rank-1"))
    }
    loaded = load_model(str(folder / "tiny-llama"))
    return Family("llama", folder / "tiny-llama", adapters, loaded, Reference(model.eval(), adapters))


@pytest.mark.parametrize(("name", "quantization"), [("awq-64", "int4"), ("gptq-sym", "int4"), ("fp8-128", "fp8")])
def test_codes_that_are_shipped_are_shared(tmp_path: Path, name: str, quantization: str) -> None:
    family = shipped_family(wide_family(tmp_path / "plain"), tmp_path / "tiny-llama", name)
    check_logprobs(family, tmp_path, "cuda", 1e-3, quantization=quantization)


@pytest.mark.parametrize(("name", "quantization"), [("awq-64", "int4"), ("gptq-sym", "int4"), ("fp8-128", "fp8")])
def test_kernels_multiply_with_a_ranks_codes(tmp_path: Path, name: str, quantization: str) -> None:
    family = shipped_family(wide_family(tmp_path / "plain"), tmp_path / "tiny-llama", name)
    with shared_by_two(
        family, tmp_path, "cuda", dtype="bfloat16", quantization=quantization, max_batch_tokens=512, num_blocks=200
    ) as parts:
        check_first_logprobs(parts, family)


@OWN_PATTERNS
def test_a_mixture_in_nf4(tmp_path: Path) -> None:
    family = mixture_in_nf4(tmp_path / "made")
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    with shared_by_two(
        family, tmp_path, "cuda", dtype="bfloat16", quantization="nf4", max_batch_tokens=512, num_blocks=100,
        block_size=64, device_adapter_mb=8.0,
    ) as parts:  # fmt: skip
        check_first_logprobs(parts, family, uids)


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
