"""The engine core over the device runner and a real adapter store: all of a worker with a GPU but the network."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.layers.kv_cache import MIB
from manylora_worker.models.loader import load_model
from manylora_worker.planning.step_planner import PlannerLimits
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.families import VOCAB_SIZE
from tests.numerics.mixtures import OWN_PATTERNS
from tests.numerics.two_ranks import check_first_logprobs, mixture_in_nf4, shared_by_two

pytestmark = pytest.mark.gpu

MAX_TOKENS = 20


@pytest.mark.parametrize("marks_free", [False, True])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text", "gemma4_text", "llama" + KV_IN_FP8])
def test_core_equals_peft(
    family_of: FamilyOf,
    name: str,
    tmp_path: Path,
    marks_free: bool,
    moves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunked prefill, a pool too small for all, adapters loaded and evicted meanwhile, graphs of many sizes; the next
    step is begun beside the last one, and stop tokens are found late. moves: blocks between KV and adapters."""
    monkeypatch.setattr("manylora_worker.engine.arena_turns.LOOK_S", 0.0)
    family = family_of(name)
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    adapter_bytes = 15 << 17 if name == "gemma4_text" else 3 << 18  # it has more layers
    is_fp8 = family.kv_cache_dtype == "fp8"
    settings = WorkerConfig(
        model=str(family.folder), threads=1, adapter_store=tmp_path, device="cuda", dtype="float32",
        num_blocks=8 if is_fp8 else 16, block_size=32 if is_fp8 else 16, host_kv_mb=0,
        device_adapter_mb=adapter_bytes / MIB, sequence_slots=8, max_batch_tokens=48, debug_fill_freed=marks_free,
        kv_cache_dtype=family.kv_cache_dtype,
    )  # fmt: skip
    parts = build_engine(settings)
    limits = EngineLimits(
        planner=PlannerLimits(max_batch_tokens=48, prefill_chunk_tokens=17, sequence_slots=8),
        adapters=AdapterCacheLimits(host_bytes=1 << 30, device_bytes=adapter_bytes),
        max_requests=100,
        arena_bytes=(adapter_bytes // 4, 2 * adapter_bytes) if moves else None,
    )
    core = EngineCore(parts.runner, parts.backend, limits, clears_freed=marks_free)
    adapter_blocks = set()
    core.set_share(TenantId("t1"), TenantShare(dict.fromkeys(QosClass, 1000)))  # the other has more than its share
    rng = random.Random(name)
    lengths = [(None, 40)] * 6  # wait for no adapter, and have no room together
    lengths += [(adapter, rng.choice((1, 3, 8, 21, 40))) for _ in range(2) for adapter in uids]
    wanted = [(adapter, [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]) for adapter, length in lengths]
    outputs = [family.reference.greedy(prompt, adapter, MAX_TOKENS) for adapter, prompt in wanted]
    stops = [output[9] if i % 3 == 0 else None for i, output in enumerate(outputs)]
    choices = [1 + (i % 4 == 1) for i in range(len(wanted))]
    late: list[EngineRequest] = []
    for i, (adapter, prompt) in enumerate(wanted):
        request = EngineRequest(
            RequestId(f"r{i}"), TenantId(f"t{i % 4 // 3}"), QosClass("interactive"), uids[adapter], tuple(prompt),
            MAX_TOKENS, Sampling(seed=i, temperature=0.0), frozenset({stops[i]} - {None}), n=choices[i],
        )  # fmt: skip
        if request.tenant_id == "t1":
            late.append(request)
        else:
            core.add(request, now=0.0)
    got: dict[tuple[str, int], list[int]] = {}
    deadline = time.monotonic() + 120
    steps_ahead = 0
    try:
        while core.has_work() or late:
            assert time.monotonic() < deadline
            if late and core.stats().steps % 8 == 7:
                core.add(late.pop(), now=0.0)
            for output in core.step(now=time.monotonic()):
                got.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
            steps_ahead += core.num_in_flight
            core.take_ended()
            core.check_invariants()
            adapter_blocks.add(core._arena.adapter_blocks if core._arena is not None else 0)
        assert (len(adapter_blocks) > 1) == moves
        for i, (adapter, prompt) in enumerate(wanted):
            stop = stops[i]
            expected = outputs[i] if stop is None else outputs[i][: outputs[i].index(stop)]
            for choice in range(choices[i]):
                found = got.get((f"r{i}", choice), [])
                if is_fp8 and found != expected:  # a stop token may be another one then
                    assert family.reference.allows(prompt, adapter, found), (adapter, len(prompt))
                else:
                    assert found == expected, (adapter, len(prompt))
        assert steps_ahead > core.stats().steps // 2
        stats = core.stats()
        assert stats.evictions > 0 or moves
        assert stats.failed_steps == 0
    finally:
        parts.backend.close()


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.8, "top_logprobs": 3},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
]


def draw(family: Family, store: Path, device: str) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """A new engine's tokens and logprobs for a dozen prompts, in each of the ways to draw, by request."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(2, 30))] for _ in range(12)]
    settings = WorkerConfig(
        model=str(family.folder), threads=1, adapter_store=store, device=device, dtype="float32", num_blocks=200,
        host_kv_mb=0, sequence_slots=8, max_batch_tokens=64,
    )  # fmt: skip
    parts = build_engine(settings)
    limits = EngineLimits(
        planner=PlannerLimits(max_batch_tokens=64, prefill_chunk_tokens=16, sequence_slots=8),
        adapters=AdapterCacheLimits(host_bytes=1 << 20, device_bytes=1 << 20),
        max_requests=100,
    )
    core = EngineCore(parts.runner, parts.backend, limits)
    for i, prompt in enumerate(prompts):
        sampling = Sampling(seed=i, **KINDS[i % len(KINDS)])
        request = EngineRequest(
            RequestId(f"r{i}"), TenantId("t"), QosClass("batch"), None, tuple(prompt), MAX_TOKENS, sampling
        )
        core.add(request, now=0.0)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    while core.has_work():
        for output in core.step(now=0.0):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            logprobs.setdefault(output.request_id, []).extend(each.logprob for each in output.logprobs)
        core.take_ended()
    parts.backend.close()
    return tokens, logprobs


def test_drawn_tokens_are_those_of_the_cpu(family_of: FamilyOf, tmp_path: Path) -> None:
    """Temperature, cuts and logprobs, in graphs and beside prompts: the tokens that the reference engine draws."""
    drawn = [draw(family_of("llama"), tmp_path, device) for device in ("cpu", "cuda")]
    assert drawn[0][0] == drawn[1][0]
    for request_id, expected in drawn[0][1].items():
        assert drawn[1][1][request_id] == pytest.approx(expected, abs=1e-3)


def test_a_step_without_memory_ends_its_requests_alone(family_of: FamilyOf, tmp_path: Path) -> None:
    from manylora_worker.models.cuda.runner import DeviceModelRunner  # needs Triton, which is where a GPU is

    family = family_of("llama")
    settings = WorkerConfig(
        model=str(family.folder), threads=1, adapter_store=tmp_path, device="cuda", dtype="float32", num_blocks=100,
        host_kv_mb=0, sequence_slots=4, max_batch_tokens=64,
    )  # fmt: skip
    parts = build_engine(settings)
    limits = EngineLimits(
        planner=PlannerLimits(max_batch_tokens=64, prefill_chunk_tokens=64, sequence_slots=4),
        adapters=AdapterCacheLimits(host_bytes=1 << 20, device_bytes=1 << 20),
        max_requests=10,
    )
    core = EngineCore(parts.runner, parts.backend, limits)
    run_layers = DeviceModelRunner._run_layers

    def run_out(runner: DeviceModelRunner, *arguments: Any) -> None:
        run_layers(runner, *arguments)
        torch.empty(1 << 42, device="cuda")

    def outputs_of(name: str) -> tuple[list[int], list[str]]:
        core.add(
            EngineRequest(
                RequestId(name), TenantId("t"), QosClass("batch"), None, prompt, MAX_TOKENS,
                Sampling(seed=0, temperature=0.0),
            ),
            now=0.0,
        )  # fmt: skip
        tokens: list[int] = []
        messages: list[str] = []
        while core.has_work():
            for output in core.step(now=0.0):
                tokens += output.token_ids
                messages += [output.message] if output.message else []
            core.take_ended()
            core.check_invariants()
        return tokens, messages

    prompt = tuple(random.Random(9).randrange(3, VOCAB_SIZE) for _ in range(40))
    expected = family.reference.greedy(list(prompt), None, MAX_TOKENS)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceModelRunner, "_run_layers", run_out)
            tokens, messages = outputs_of("without")
        assert tokens == []
        assert len(messages) == 1
        assert "the step failed: OutOfMemoryError" in messages[0]
        assert core.stats().failed_steps >= 1
        assert outputs_of("with") == (expected, [])
    finally:
        parts.backend.close()


def test_garbage_does_not_spoil_a_capture(family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of an engine that is gone lie in a cycle, and whoever may run the collector does so during a capture."""
    from manylora_worker.models.cuda.forward.decoder import Decoder  # needs Triton, which is where a GPU is

    family = family_of("llama")
    expected, _ = draw(family, tmp_path, "cpu")
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            torch.ones(8, device="cuda").mul_(2)
    cycle: list[Any] = [graphs]
    cycle.append(cycle)
    kept = [cycle]
    del graphs, graph, cycle
    captures = 0
    run_layers = Decoder.run_layers

    def run_layers_and_collect(*arguments: Any) -> Any:
        nonlocal captures
        if torch.cuda.is_current_stream_capturing():
            captures += 1
            kept.clear()
            if gc.isenabled():
                gc.collect()
        return run_layers(*arguments)

    monkeypatch.setattr(Decoder, "run_layers", run_layers_and_collect)
    drawn, _ = draw(family, tmp_path, "cuda")
    assert captures > 0
    assert drawn == expected


@OWN_PATTERNS
def test_a_mixture_in_nf4(tmp_path: Path) -> None:
    """Dense layers and experts, with an adapter on both and without."""
    family = mixture_in_nf4(tmp_path / "made")
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    with shared_by_two(
        family, tmp_path, "cuda", dtype="bfloat16", quantization="nf4", max_batch_tokens=512, num_blocks=100,
        block_size=64, device_adapter_mb=8.0, tensor_parallel=1,
    ) as parts:  # fmt: skip
        check_first_logprobs(parts, family, uids)


def test_experts_come_to_a_device_in_nf4(tmp_path: Path) -> None:
    """It has no more than a layer of them as they were."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    plain_bytes = sum(each.nbytes for name, each in model.named_parameters() if ".experts." in name)
    model.save_pretrained(tmp_path / "mixture")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded = load_model(str(tmp_path / "mixture"), dtype=torch.bfloat16, device="cuda", quantization="nf4")
    assert torch.cuda.max_memory_allocated() - before < 0.6 * plain_bytes
    assert all(each.is_cuda for each in loaded.model.buffers())
