"""Makes quantized checkpoints out of plain ones, from the formats' definitions and by code of its own.

Each of `FORMATS` writes a folder and returns the weights that it stands for, in float32.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.cuda.kernels.nf4_format import dequantize_reference, quantize
from manylora_worker.models.loader import LoadedModel
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from tests.numerics.adapters import Reference
from tests.numerics.conftest import Family
from tests.numerics.driver import Driver, Stream, make_runner, put_adapter
from tests.numerics.test_checkpoint import logits_of

Parts = Mapping[str, Tensor]
_LARGEST = 448.0
PROMPT = list(range(3, 20))


def fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale: of every element. Codes, and what they stand for."""
    codes = (weight / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def in_blocks(weight: Tensor, rows: int = 32, columns: int = 32) -> tuple[Parts, Tensor]:
    outputs, inputs = weight.shape
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
    whole = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[at].abs().max() / _LARGEST
            whole[at] = scales[i, j]
    codes, stood_for = fp8(weight, whole)
    return {"weight": codes, "weight_scale_inv": scales}, stood_for


def by_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / _LARGEST).bfloat16()
    codes, stood_for = fp8(weight, scales.float())
    return {"weight": codes, "weight_scale": scales}, stood_for


def by_tensor(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().max() / _LARGEST
    codes, stood_for = fp8(weight, scale)
    return {"weight": codes, "weight_scale": scale[None], "input_scale": torch.tensor([0.1])}, stood_for


def _words(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Codes [n, 8m], eight neighbours of a row to a word [n, m]; the word's i-th four bits are of order[i]."""
    n = codes.shape[0]
    packed = torch.zeros(n, codes.shape[1] // 8, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        packed |= codes[:, neighbour::8].long() << (4 * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def _grouped(weight: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [in, out], zeros and scales [groups, out], and what they stand for [out, in]."""
    w = weight.T
    groups = int(group.max()) + 1
    low = torch.stack([w[group == g].amin(0).clamp_max(0) for g in range(groups)])
    high = torch.stack([w[group == g].amax(0).clamp_min(0) for g in range(groups)])
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    codes = ((w / scales.float()[group]).round() + zeros[group]).clamp(0, 15).int()
    return codes, zeros, scales, ((codes - zeros[group]).float() * scales.float()[group]).T.contiguous()


def awq(weight: Tensor, size: int = 32) -> tuple[Parts, Tensor]:
    codes, zeros, scales, stood_for = _grouped(weight, torch.arange(weight.shape[1]) // size)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": _words(codes, order), "qzeros": _words(zeros, order), "scales": scales}, stood_for


def symmetric_gptq(weight: Tensor) -> tuple[Parts, Tensor]:
    """Zeros of 8, as most of them are published, and groups of all inputs."""
    scales = (weight.abs().amax(1, keepdim=True) / 7).half()
    codes = ((weight / scales.float()).round() + 8).clamp(0, 15).int()
    plain = tuple(range(8))
    parts = {
        "qweight": _words(codes, plain).T.contiguous(),
        "qzeros": _words(torch.full((1, len(weight)), 7), plain),
        "scales": scales.T.contiguous(),
        "g_idx": torch.zeros(weight.shape[1], dtype=torch.int32),
    }
    return parts, (codes - 8).float() * scales.float()


def gptq(weight: Tensor, size: int = 32, *, shuffled: bool = False) -> tuple[Parts, Tensor]:
    inputs = weight.shape[1]
    order = (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if shuffled else torch.arange(inputs)
    )
    group = torch.empty(inputs, dtype=torch.int64)
    group[order] = torch.arange(inputs) // size
    codes, zeros, scales, stood_for = _grouped(weight, group)
    plain = tuple(range(8))
    parts = {
        "qweight": _words(codes.T.contiguous(), plain).T.contiguous(),
        "qzeros": _words((zeros - 1) & 15, plain),
        "scales": scales,
        "g_idx": group.int(),
    }
    return parts, stood_for


def shuffled_gptq(weight: Tensor) -> tuple[Parts, Tensor]:
    return gptq(weight, shuffled=True)


def packed(weight: Tensor, size: int = 32, *, shuffled: bool = False) -> tuple[Parts, Tensor]:
    """Without zeros: codes from -8 to 7, stored with 8 added, eight inputs of an output to a word."""
    outputs, inputs = weight.shape
    group = torch.arange(inputs) // size
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    largest = torch.stack([weight[:, group == g].abs().amax(1) for g in range(int(group.max()) + 1)], 1)
    scales = (largest / 7.5).bfloat16()
    codes = (weight / scales.float()[:, group]).round().clamp(-8, 7)
    parts = {
        "weight_packed": _words((codes + 8).int(), tuple(range(8))),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    return parts | ({"weight_g_idx": group.int()} if shuffled else {}), codes * scales.float()[:, group]


def packed_with_zeros(weight: Tensor, size: int = 32) -> tuple[Parts, Tensor]:
    codes, zeros, scales, stood_for = _grouped(weight, torch.arange(weight.shape[1]) // size)
    plain = tuple(range(8))
    parts = {
        "weight_packed": _words(codes.T.contiguous(), plain),
        "weight_zero_point": _words(zeros, plain).T.contiguous(),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, stood_for


def packed_by_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    return packed(weight, weight.shape[1])


def shuffled_packed(weight: Tensor) -> tuple[Parts, Tensor]:
    return packed(weight, shuffled=True)


def packs(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": strategy}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | more, "input_activations": None}},
        "quantization_status": "compressed",
    }  # fmt: skip


def _group(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    return {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}


def _compressed(strategy: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": _group(strategy)}, "quantization_status": "compressed",
    }  # fmt: skip


Write = Callable[[Tensor], tuple[Parts, Tensor]]
FORMATS: Mapping[str, tuple[dict[str, Any], Write]] = {
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}, in_blocks
    ),
    "fp8-channel": (_compressed("channel"), by_channel),
    "fp8-tensor": (_compressed("tensor"), by_tensor),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}, gptq),
    "gptq-sym": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False}, symmetric_gptq),
    **{
        f"fp8-{n}": (
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [n, n]},
            partial(in_blocks, rows=n, columns=n),
        )
        for n in (8, 16, 128)
    },
    **{
        f"awq-{n}": (
            {"quant_method": "awq", "bits": 4, "group_size": n, "version": "gemm", "zero_point": True},
            partial(awq, size=n),
        )
        for n in (8, 16, 64)
    },
    "packed": (packs("group", group_size=32), packed),
    "packed-zeros": (packs("group", group_size=32, symmetric=False), packed_with_zeros),
    "packed-channel": (packs("channel", group_size=None), packed_by_channel),
    "packed-actorder": (packs("group", group_size=32, actorder="group"), shuffled_packed),
    "gptq-desc-act": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, shuffled_gptq),
}  # fmt: skip


def ship(source: Path, folder: Path, name: str, leaves: tuple[str, ...] = ("_proj",)) -> dict[str, Tensor]:
    """Writes the checkpoint in that format. Returns the weights that it stands for, by name. leaves: how the names of
    layers end that are quantized.
    """
    stated, write = FORMATS[name]
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    tensors, stands_for = {}, {}
    for key, tensor in _experts_apart(load_file(source / "model.safetensors")).items():
        path, _, leaf = key.rpartition(".")
        if not path.endswith(leaves) or leaf != "weight":
            tensors[key] = stands_for[key] = tensor
            continue
        parts, stands_for[key] = write(tensor.float())
        tensors |= {f"{path}.{part}": value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return experts_stacked(stands_for)


def _experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One by one, as quantized checkpoints have them."""
    apart = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if not path.endswith(".experts"):
            apart[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            members = (
                {"down_proj": own}
                if leaf == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
            )
            apart |= {f"{path}.{expert}.{member}.weight": each.contiguous() for member, each in members.items()}
    return apart


def experts_stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' modules have them."""
    stacked = {name: each for name, each in tensors.items() if ".experts." not in name}
    for path in {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{path}.") and name.endswith(".down_proj.weight") for name in tensors)
        own = [[tensors[f"{path}.{i}.{each}_proj.weight"] for each in ("gate", "up", "down")] for i in range(count)]
        stacked[f"{path}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in own])
        stacked[f"{path}.down_proj"] = torch.stack([down for *_, down in own])
    return stacked


def quantized_layers(model: PreTrainedModel) -> list[torch.nn.Linear]:
    """All but the head and Gemma 4's router, which is one; other routers are none."""
    layers = [(path, each) for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    return [each for path, each in layers if each is not model.get_output_embeddings() and ".router." not in path]


def to_fp8_by_output(model: PreTrainedModel) -> None:
    """In place: what is quantized of linear layers, and experts' stacks."""
    stacks = [each for name, each in model.named_parameters() if ".experts." in name and each.dim() == 3]
    for weight in [*(each.weight for each in quantized_layers(model)), *stacks]:
        is_turned = weight.dim() == 3 and model.config.model_type == "gpt_oss"  # [experts, in, out]
        scales = weight.data.abs().amax(1 if is_turned else -1, keepdim=True) / _LARGEST
        weight.data = fp8(weight.data, scales)[1]


def experts_to_nf4(model: PreTrainedModel) -> None:
    """In place, each expert by itself. test_nf4_format.py compares its quantization with bitsandbytes'."""
    stacks = [each for name, each in model.named_parameters() if ".experts." in name and each.dim() == 3]
    for weight in (expert for stack in stacks for expert in stack.data):
        turned, parts = weight, 1
        if model.config.model_type == "gpt_oss":  # [in, out], of gate and up in turn
            parts = weight.shape[1] // weight.shape[0]
            turned = torch.cat([weight.T[i::parts] for i in range(parts)])
        found = dequantize_reference(quantize(turned), torch.float32)
        if model.config.model_type == "gpt_oss":
            found = torch.stack(found.chunk(parts), 1).flatten(0, 1).T
        weight.copy_(found)


def to_our_nf4(model: PreTrainedModel) -> None:
    """In place, as a GPU has it, but for the scales of layers that are fused or shared there."""
    for layer in quantized_layers(model):
        layer.weight.data = dequantize_reference(quantize(layer.weight.data), torch.float32)
    experts_to_nf4(model)


def to_nf4(model: PreTrainedModel, folder: Path) -> None:
    """In place, experts as above, linear layers as bitsandbytes has them. folder: its weights."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layers = quantized_layers(model)
    left = [path for path, each in model.named_modules() if isinstance(each, torch.nn.Linear) and each not in layers]
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=left
    )
    made = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, device_map={"": "cpu"}, dtype=torch.float32
    )
    for path, module in made.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            model.get_submodule(path).weight.data.copy_(weight)
    experts_to_nf4(model)


def shipped_family(family: Family, folder: Path, name: str) -> Family:
    """The family in that format, and as reference the weights that it stands for. folder: of the model's name."""
    stands_for = ship(family.folder, folder, name)
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(stands_for, strict=False)
    return dataclasses.replace(family, folder=folder, reference=Reference(model.eval(), family.adapters))


def check_with_adapter(loaded: LoadedModel, reference: PreTrainedModel, adapter: Path, *, atol: float) -> None:
    """Logits and greedy tokens of an engine, with and without the adapter, against transformers and PEFT."""
    driver = Driver(make_runner(loaded))
    uid = put_adapter(driver.runner, loaded, adapter)
    plain, adapted = driver.logits([Stream(PROMPT), Stream(PROMPT, uid)])
    torch.testing.assert_close(plain, logits_of(reference, PROMPT), atol=atol, rtol=0)
    wrapped = PeftModel.from_pretrained(reference, adapter).eval()
    torch.testing.assert_close(adapted, logits_of(wrapped, PROMPT), atol=atol, rtol=0)
    assert not torch.allclose(plain, adapted, atol=1e-2)
    streams = [Stream(PROMPT), Stream(PROMPT, uid)]
    driver.run(streams, 5)
    for stream, model in zip(streams, (None, wrapped), strict=True):
        with torch.no_grad(), wrapped.disable_adapter() if model is None else nullcontext():
            expected = wrapped.generate(
                input_ids=torch.tensor([PROMPT]), max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None
            )
        assert stream.output == expected[0, len(PROMPT) :].tolist()
