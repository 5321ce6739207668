"""An engine whose model two ranks share, and what it must answer: as transformers + peft, one request at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling, state_blocks_of
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.models.build import build_engine
from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.layers.kv_cache import MIB
from manylora_worker.models.loader import load_model
from manylora_worker.models.parts import EngineParts
from manylora_worker.models.ranks import cuts
from manylora_worker.planning.step_planner import PlannerLimits
from transformers import AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.numerics.adapters import Reference, save_adapter
from tests.numerics.conftest import Family
from tests.numerics.driver import composed
from tests.numerics.families import FAMILIES, RECURRENT, VOCAB_SIZE
from tests.numerics.mixtures import RECIPES as MIXTURE_RECIPES
from tests.numerics.mixtures import make_mixture
from tests.numerics.quantizing import to_our_nf4
from tests.numerics.test_checkpoint import published
from tests.numerics.test_swaps_against_peft import NUM_BLOCKS, asked, fight

SHARED_MIXTURES = (
    *("qwen3_moe", "qwen3_5_moe_wide", "qwen3_next_wide", "gemma4_moe_wide"),
    *("mixtral_wide", "qwen2_moe_wide", "gpt_oss_blocks", "glm4_moe", "dots1", "granite4_h_moe_wide"),
)
SHARED_FAMILIES = (
    *sorted(cuts.SHARED_FAMILIES & FAMILIES.keys()),
    *("qwen3_5_text", "qwen3_5_wide", "gemma4_text", "gemma4_shared", "granite4_h", "granite4_h_wide"),
)
MAX_TOKENS = 12
TOP = 8


def tolerance_of(name: str) -> float:
    """On the CPU. A state adds up what sums in another order are off by, on one rank as on two."""
    return 5e-4 if name in RECURRENT else 1e-4


class _Apart(Reference):
    """Of one adapter each."""

    def __init__(self, references: Mapping[str | None, Reference]) -> None:
        self._references = references

    def logits(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        return self._references[adapter].logits(token_ids, adapter)

    def allows(self, token_ids: list[int], adapter: str | None, answer: list[int]) -> bool:
        return self._references[adapter].allows(token_ids, adapter, answer)


def mixture_family(
    parent: Path, name: str = "qwen3_moe", *, shipped: str = "", quantization: Quantization = "none"
) -> Family:
    made = make_mixture(parent, name, shipped=shipped, quantization=quantization)
    return Family(name, made.folder, dict(made.adapters), made.loaded, _Apart(made.references))


def text_family(parent: Path, name: str) -> Family:
    """Of a model of text and images, with one adapter."""
    parent.mkdir()
    model = published(name, parent / "model", of=AutoModelForImageTextToText)
    targets = r".*language_model.*\.(q_proj|k_proj|o_proj)"
    adapters = {"text": save_adapter(model, parent / "text", 0, r=4, lora_alpha=8, target_modules=targets)}
    reference = Reference(model, adapters)
    loaded = load_model(str(parent / "model"))
    return Family(name, parent / "model", adapters, loaded, _Apart({"text": reference, None: reference}))


@contextmanager
def shared_by_two(family: Family, store: Path, device: str, **changes: Any) -> Iterator[EngineParts]:
    settings: dict[str, Any] = {
        "model": str(family.folder), "adapter_store": store, "device": device, "dtype": "float32", "threads": 1,
        "num_blocks": NUM_BLOCKS, "sequence_slots": 10, "max_batch_tokens": 48, "tensor_parallel": 2,
        "kv_cache_dtype": family.kv_cache_dtype,
    }  # fmt: skip
    parts = build_engine(WorkerConfig(**(settings | changes)))
    try:
        yield parts
    finally:
        parts.backend.close()


def check_fight(family: Family, store: Path, device: str) -> None:
    """Three tenants fight for too little KV: steps, prefixes, swaps, and adapters that come and go."""
    uids: dict[str | None, AdapterUid | None] = {None: None, **family.put_adapters(store / "objects")}
    block_bytes = family.loaded.spec.kv.token_bytes(torch.float32) * 16 // 2  # a rank's half
    adapter_bytes = 8 << 20
    with shared_by_two(
        family, store, device, host_kv_mb=10 * block_bytes / MIB, device_adapter_mb=adapter_bytes / MIB
    ) as parts:
        limits = EngineLimits(
            PlannerLimits(48, 17, 10),
            AdapterCacheLimits(host_bytes=1 << 30, device_bytes=adapter_bytes),
            max_requests=64,
        )
        is_recurrent = state_blocks_of(parts.runner) > 0
        assert is_recurrent == (family.loaded.spec.kv.state is not None)
        prefix = None if is_recurrent else PrefixOptions(PrefixKeys(bytes(32), "model"), 0.5)
        fight(family, EngineCore(parts.runner, parts.backend, limits, prefix), asked(family, 30, 16), uids)


def check_first_logprobs(
    parts: EngineParts, family: Family, uids: Mapping[str | None, AdapterUid | None] | None = None
) -> None:
    """In bf16, of a prompt that kernels take and of one whose rows rebuild the weight."""
    limits = EngineLimits(PlannerLimits(512, 512, 10), AdapterCacheLimits(1 << 30, 8 << 20), max_requests=8)
    core = EngineCore(parts.runner, parts.backend, limits)
    for (name, uid), count in product((uids or {None: None}).items(), (7, 100)):
        prompt = [3 + (7 * i) % 50 for i in range(count)]
        sampling = Sampling(temperature=0.0, top_logprobs=8)
        request = EngineRequest(
            RequestId(f"{name}{count}"), TenantId("t"), QosClass.BATCH, uid, tuple(prompt), 2, sampling
        )
        core.add(request, 0.0)
        told = []
        while core.has_work():
            told += [dict(each.top) for output in core.step(0.0) for each in output.logprobs]
        core.take_ended()
        expected = torch.log_softmax(family.reference.logits(prompt, name)[-1], -1)
        assert told[0] == pytest.approx({token: float(expected[token]) for token in told[0]}, abs=0.25)
        assert abs(float(expected.max()) - max(told[0].values())) < 0.1


def mixture_in_nf4(folder: Path) -> Family:
    """Of which two ranks have whole blocks. Every expert is chosen: bf16 leaves it at those that the reference has."""
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.06, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, num_experts=8, num_experts_per_tok=8, moe_intermediate_size=128, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "tiny-mixture")
    model.float().name_or_path = "someone/tiny-mixture"
    adapter = save_adapter(model, folder / "all-linear", 1, **MIXTURE_RECIPES["all-linear"])
    to_our_nf4(model)
    loaded = load_model(str(folder / "tiny-mixture"))
    adapters = {"all-linear": adapter}
    return Family("qwen3_moe", folder / "tiny-mixture", adapters, loaded, Reference(model.eval(), adapters))


def check_logprobs(family: Family, store: Path, device: str, tolerance: float, **changes: Any) -> None:
    """Every adapter, mixed: greedy tokens, and the logprobs of the likeliest at each of them."""
    uids: dict[str | None, AdapterUid | None] = {None: None, **family.put_adapters(store / "objects")}
    keys = {**uids, **({} if isinstance(family.reference, _Apart) else composed(family.reference, uids))}
    rng = random.Random(family.name)
    wanted = [
        (name, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 8, 21, 40)))])
        for name in (*keys, None, *list(uids)[1:3])
    ]
    with shared_by_two(family, store, device, num_blocks=200, device_adapter_mb=8.0, **changes) as parts:
        limits = EngineLimits(
            PlannerLimits(48, 17, 10), AdapterCacheLimits(host_bytes=1 << 30, device_bytes=8 << 20), max_requests=64
        )
        core = EngineCore(parts.runner, parts.backend, limits)
        for i, (name, prompt) in enumerate(wanted):
            sampling = Sampling(seed=i, temperature=0.0, top_logprobs=TOP)
            core.add(
                EngineRequest(
                    RequestId(f"{i}"), TenantId("t"), QosClass("batch"), keys[name], tuple(prompt), MAX_TOKENS, sampling
                ),
                0.0,
            )
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[dict[int, float]]] = {}
        deadline = time.monotonic() + 240
        while core.has_work():
            assert time.monotonic() < deadline
            for output in core.step(time.monotonic()):
                assert output.finish_reason is not FinishReason.ERROR, output.message
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                logprobs.setdefault(output.request_id, []).extend(dict(each.top) for each in output.logprobs)
            core.take_ended()
    for i, (name, prompt) in enumerate(wanted):
        got = tokens[f"{i}"]
        assert family.reference.allows(prompt, name, got), (name, len(prompt))
        expected = torch.log_softmax(family.reference.logits(prompt + got[:-1], name)[len(prompt) - 1 :], -1)
        for row, found in zip(expected, logprobs[f"{i}"], strict=True):
            assert found == pytest.approx({token: float(row[token]) for token in found}, abs=tolerance)
