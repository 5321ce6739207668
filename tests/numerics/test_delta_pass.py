"""Gated delta nets and Mamba in the GPU's decoder and its graphs, padding and prompts beside rows that decode, against
transformers + peft; in Triton's interpreter a model of two layers, on a GPU layers of Qwen3.5-9B's shape, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, StepBatch
from manylora_worker.models import loader
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.planning.step_planner import PlannerLimits
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.numerics.adapters import Reference, save_adapter
from tests.numerics.driver import GREEDY, Driver, Stream, prompts

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner
from manylora_worker.models.torch.decoder import trusted_weights

from tests.numerics.interpreter import needs_interpreter
from tests.numerics.mixtures import OWN_PATTERNS
from tests.numerics.test_cuda_runner import put_device_adapter, random_adapter, real_pair, rehearse

pytestmark = pytest.mark.kernels

SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 64, "pad_token_id": 0,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.25,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip


FEW_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA = {
    "vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "pad_token_id": 0, "layer_types": ["mamba", "attention"], "initializer_range": 0.25,
    "shared_intermediate_size": 40, "position_embedding_type": "nope", "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 12, "mamba_n_groups": 2, "residual_multiplier": 0.5,
}  # fmt: skip
MODELS = {
    "mamba": lambda: GraniteMoeHybridConfig(**MAMBA, num_local_experts=0),
    "mamba mixture": lambda: GraniteMoeHybridConfig(
        **MAMBA, num_local_experts=4, num_experts_per_tok=2, intermediate_size=16
    ),
    "dense": lambda: Qwen3_5TextConfig(**SMALL),
    "mixture": lambda: Qwen3_5MoeTextConfig(**SMALL, **FEW_EXPERTS),
    "next": lambda: Qwen3NextConfig(**{**SMALL, "rope_parameters": None}, **FEW_EXPERTS, partial_rotary_factor=0.5),
}


@needs_interpreter
@OWN_PATTERNS
@pytest.mark.parametrize(
    ("kind", "has_graphs"),
    [
        ("dense", False), ("dense", True), ("mixture", True), ("next", True), ("mamba", False), ("mamba", True),
        ("mamba mixture", True),
    ],
)  # fmt: skip
def test_the_core_in_the_interpreter(
    kind: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begun ahead, prompts in chunks beside decodes of other adapters; in the graphs' shapes rows of prompts pass
    as decoding ones, and no state may move twice for it."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind](), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("mamba.A_log"):
            parameter.data.uniform_(-4.0, 0.0)  # so that a state is felt for long
    model.save_pretrained(tmp_path / "model")
    folders = {
        name: save_adapter(model, tmp_path / name, seed, r=rank, lora_alpha=rank, target_modules="all-linear")
        for seed, (name, rank) in enumerate((("four", 4), ("twenty", 20)))
    }
    reference = Reference(model, folders)
    loaded = loader.load_model(str(tmp_path / "model"))
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    block_size = 64 if kind == "next" else 40  # 16 ranks of its widest layer fit in a block
    cache = KvCache(loaded.spec.kv, num_blocks=200, block_size=block_size, dtype=loaded.dtype, device=loaded.device)
    limits = DeviceLimits(max_rows=16, max_sequences=4, adapter_slots=2, max_rank=64)
    runner = DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=100)
    assert runner.state_blocks > 0
    if has_graphs:
        monkeypatch.setattr(runner, "_capture", True)
        monkeypatch.setattr(runner, "_graph_of", lambda tables, run: rehearse(tables, run, runner._packer.padding_row))
    uids = {name: AdapterUid(put_device_adapter(runner, loaded, folder)) for name, folder in folders.items()}
    core = EngineCore(
        runner, FakeAdapterBackend(lambda: 0.0),
        EngineLimits(PlannerLimits(8, 3, 4), AdapterCacheLimits(2, 2), max_requests=8),
    )  # fmt: skip
    asked = [("four", 8), (None, 1), ("twenty", 5), ("four", 3), (None, 7)]
    given = [prompts(1, seed=i, shortest=length, longest=length)[0] for i, (_, length) in enumerate(asked)]
    for i, ((name, _), prompt) in enumerate(zip(asked, given, strict=True)):
        uid = None if name is None else uids[name]
        core.add(EngineRequest(RequestId(str(i)), TenantId("t"), QosClass.BATCH, uid, tuple(prompt), 5, GREEDY), 0.0)
    got: dict[str, list[int]] = {}
    ahead = 0
    while core.has_work():
        for output in core.step(0.0):
            assert not output.message
            got.setdefault(output.request_id, []).extend(output.token_ids)
        ahead += core.num_in_flight
        core.check_invariants()
    assert core.step_error is None
    assert ahead > 4
    assert bool(runner._recordings) == bool(runner._mixed_graphs) == has_graphs
    for i, ((name, _), prompt) in enumerate(zip(asked, given, strict=True)):
        assert got[str(i)] == reference.greedy(prompt, name, 5), name


WIDE = {
    "vocab_size": 32000, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 256,
    "max_position_embeddings": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        Qwen3_5TextConfig(**WIDE, hidden_size=4096, intermediate_size=12288, num_key_value_heads=4),
        Qwen3NextConfig(
            **WIDE, hidden_size=2048, intermediate_size=5120, num_key_value_heads=2, mlp_only_layers=list(range(4))
        ),
        GraniteMoeHybridConfig(
            vocab_size=32000, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=2048, layer_types=[*["mamba"] * 3, "attention"], num_local_experts=0,
            shared_intermediate_size=8192, position_embedding_type="nope", mamba_n_heads=64, mamba_d_head=64,
            mamba_d_state=128, tie_word_embeddings=False,
        ),
    ],
    ids=["qwen3.5-9b", "qwen3-next without experts", "granite-4.0-h without experts"],
)  # fmt: skip
def test_layers_of_a_real_shape_in_bfloat16(config: PretrainedConfig) -> None:
    """Prompts in chunks beside decodes in graphs, rows of four adapters, against the same layers in float32 without and
    with those adapters in their weights. Tokens are given."""
    model, exact = real_pair(config)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    loaded = loader.prepare_model(model.requires_grad_(False), name="wide")
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    block_size = 131072 // (config.num_key_value_heads * head_dim)  # 16 ranks of its widest layer fit in a block
    cache = KvCache(loaded.spec.kv, num_blocks=1200, block_size=block_size, dtype=loaded.dtype, device=loaded.device)
    limits = DeviceLimits(max_rows=512, max_sequences=64, adapter_slots=4, max_rank=64)
    runner = DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=500)
    adapters = [random_adapter(loaded, rank, index) for index, rank in enumerate((8, 16, 40, 64))]
    for adapter in adapters:
        runner.reserve_adapter(adapter)
        runner.fill_adapter(adapter)
    driver = Driver(runner)  # type: ignore[arg-type]
    drawn = prompts(24, seed=3, shortest=2, longest=60)
    streams = [Stream(prompt, None if i % 5 == 4 else adapters[i % 5].uid) for i, prompt in enumerate(drawn)]
    while any(stream.num_computed < len(stream.prompt) for stream in streams):
        waiting = [stream for stream in streams if stream.num_computed < len(stream.prompt)]
        runner.execute(StepBatch([driver.chunk(stream, 17) for stream in waiting]))
    found = []
    for step in range(3):
        for stream in streams:
            stream.output.append(7 + step)
        found.append(driver.logits(streams[: len(streams) - 3 * step]))
    check_rows(streams, found, exact, runner)


def check_rows(
    streams: list[Stream], found: list[torch.Tensor], exact: torch.nn.Module, runner: DeviceModelRunner
) -> None:
    plain = {name: parameter.detach().clone() for name, parameter in exact.named_parameters()}
    for uid in {stream.adapter_uid for stream in streams}:
        if uid is not None:
            merge(exact, runner, uid)
        for i, stream in enumerate(streams):
            if stream.adapter_uid != uid:
                continue
            own = [rows[i] for rows in found if i < len(rows)]
            length = len(stream.prompt) + len(own)
            with torch.inference_mode():
                wanted = exact(torch.tensor([stream.tokens[:length]], device="cuda")).logits[0, -len(own) :].float()
            for got, want in zip(own, wanted, strict=True):
                assert (got - want).norm() / want.norm() < 0.04
        exact.load_state_dict(plain)


def merge(exact: torch.nn.Module, runner: DeviceModelRunner, uid: str) -> None:
    adapter = runner._adapters.read(AdapterUid(uid))
    for site in runner._loaded.sites:
        weights = adapter.sites.get(site.index)
        if weights is None:
            continue
        for own in weights.slots:
            slot = site.slots[own.slot]
            rows = [row for each in slot.outputs or (range(slot.stop - slot.start),) for row in each]
            change = weights.a_t[:, own.start : own.stop].float() @ own.b.float()
            exact.get_submodule(slot.path).weight.data[rows] += change.T
