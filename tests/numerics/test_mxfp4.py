"""gpt-oss as it is published: experts in MXFP4, and its config.json's fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.mxfp4 import rebuilt_stacks
from manylora_worker.models.quantized.schemes import SchemeRefused
from manylora_worker.planning.step_planner import PlannerLimits
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.numerics.adapters import Reference
from tests.numerics.conftest import Family
from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.test_checkpoint import logits_of
from tests.numerics.two_ranks import shared_by_two

EXPERTS, HIDDEN, WIDTH = 4, 64, 96
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 2,
    "experts_per_token": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": HIDDEN, "initial_context_length": 8,
    "initializer_range": 0.25, "intermediate_size": WIDTH, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256, "model_type": "gpt_oss", "num_attention_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": EXPERTS, "output_router_logits": False,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 8,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 9, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 131,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        "quant_method": "mxfp4",
    },
}  # fmt: skip
PATH = "model.layers.{}.mlp.experts"
# by code: sign, two bits of an exponent, one of a fraction
KNOWN = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed(codes: torch.Tensor, exponents: torch.Tensor) -> dict[str, torch.Tensor]:
    """codes: [experts, out, in], 0 to 15; exponents: [experts, out, in / 32]. The first of two stands low."""
    pairs = codes.view(*exponents.shape, 16, 2)
    return {"blocks": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), "scales": (exponents + 127).to(torch.uint8)}


def test_known_values() -> None:
    codes = torch.arange(16).repeat(2).view(1, 1, 32).repeat(1, 2, 2)
    exponents = torch.tensor([[[0, 3], [-4, 1]]])
    stored = packed(codes, exponents)
    parts = {f"{stack}_{part}": each for stack in ("gate_up_proj", "down_proj") for part, each in stored.items()}
    found = rebuilt_stacks("e", parts, torch.bfloat16)["down_proj"]
    assert found.shape == (1, 64, 2)
    twice = torch.tensor(KNOWN).repeat(2)
    for output, (first, second) in enumerate(((1.0, 8.0), (1 / 16, 2.0))):
        assert found[0, :, output].tolist() == torch.cat((twice * first, twice * second)).tolist()
    with pytest.raises(SchemeRefused, match=r"e: has no down_proj_scales"):
        rebuilt_stacks("e", {name: each for name, each in parts.items() if name != "down_proj_scales"}, torch.float32)
    with pytest.raises(SchemeRefused, match=r"e.gate_up_proj: blocks \[1, 2, 2, 16\] and scales \[1, 2, 1\]"):
        rebuilt_stacks("e", parts | {"gate_up_proj_scales": stored["scales"][..., :1]}, torch.float32)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder, and its tensors."""
    folder = tmp_path_factory.mktemp("published") / "gpt-oss"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{name: each for name, each in PUBLISHED.items() if name != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for stack, inputs, outputs in (("gate_up_proj", HIDDEN, 2 * WIDTH), ("down_proj", WIDTH, HIDDEN)):
            name = f"{PATH.format(layer)}.{stack}"
            assert tensors.pop(name).shape == (EXPERTS, inputs, outputs)
            codes = torch.randint(16, (EXPERTS, outputs, inputs))
            stored = packed(codes, torch.randint(-5, 0, (EXPERTS, outputs, inputs // 32)))
            tensors |= {f"{name}_{part}": each for part, each in stored.items()}
            tensors[f"{name}_bias"].normal_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return folder, tensors


def test_a_published_checkpoint_computes_what_transformers_rebuild(
    published: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = published
    loaded = load_model(str(folder))
    assert loaded.spec.max_context_tokens == 256
    config = AutoConfig.for_model(**{name: each for name, each in PUBLISHED.items() if name != "quantization_config"})
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {name: each for name, each in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        weights[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).float()
    reference.load_state_dict(weights)
    prompt = list(range(3, 40))
    (logits,) = Driver(make_runner(loaded)).logits([Stream(prompt)])
    torch.testing.assert_close(logits, logits_of(reference, prompt), atol=1e-4, rtol=0)


@pytest.mark.wide
def test_two_ranks_share_it(published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = published
    loaded, prompt = load_model(str(folder)), list(range(3, 40))
    (logits,) = Driver(make_runner(loaded)).logits([Stream(prompt)])
    expected = torch.log_softmax(logits, -1)
    family = Family("gpt_oss", folder, {}, loaded, Reference(loaded.model, {}))
    with shared_by_two(family, tmp_path, "cpu") as parts:
        core = EngineCore(
            parts.runner, parts.backend,
            EngineLimits(PlannerLimits(48, 48, 4), AdapterCacheLimits(1 << 30, 1 << 20), max_requests=4),
        )  # fmt: skip
        sampling = Sampling(temperature=0.0, top_logprobs=8)
        core.add(EngineRequest(RequestId("r"), TenantId("t"), QosClass.BATCH, None, tuple(prompt), 1, sampling), 0.0)
        told: list[dict[int, float]] = []
        while core.has_work():
            told += [dict(each.top) for output in core.step(0.0) for each in output.logprobs]
    assert told[0] == pytest.approx({token: float(expected[token]) for token in told[0]}, abs=1e-4)


def test_what_does_not_fit_is_named(published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = published
    edited = tmp_path / "edited"
    edited.mkdir()

    def refusal(kept: dict[str, torch.Tensor], skipped: str = "") -> str:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"] += [skipped] if skipped else []
        (edited / "config.json").write_text(json.dumps(config))
        save_file(kept, edited / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelRefused) as caught:
            load_model(str(edited))
        return str(caught.value)

    path = PATH.format(1)
    assert f"{path}: has no down_proj_scales" in refusal(
        {name: each for name, each in tensors.items() if name != f"{path}.down_proj_scales"}
    )
    assert f"{PATH.format(0)}: is quantized, though" in refusal(tensors, "model.layers.*.mlp.experts")
    plain = {name: each for name, each in tensors.items() if not name.startswith(path) or name.endswith("bias")}
    plain |= {f"{path}.gate_up_proj": torch.zeros(EXPERTS, HIDDEN, 2 * WIDTH)}
    plain |= {f"{path}.down_proj": torch.zeros(EXPERTS, WIDTH, HIDDEN)}
    assert f"{path}: is not quantized" in refusal(plain)
    with pytest.raises(ModelRefused, match="mxfp4 experts"):
        load_model(str(folder), quantization="nf4")
