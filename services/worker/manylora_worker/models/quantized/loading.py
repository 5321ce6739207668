"""Quantized weights on a model's way into memory: a checkpoint's own, bitsandbytes' and those that we make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from manylora_worker.models.checkpoint import (
    ModelRefused,
    Quantization,
    class_of,
    renamings,
    text_path,
    weight_files,
    whole_names,
)
from manylora_worker.models.experts import find_experts, modules_of, router_linears
from manylora_worker.models.linears import head_modules_of, linear_modules
from manylora_worker.models.quantized.install import (
    ShippedCodes,
    keep_int4,
    quantize_to_fp8,
    quantize_to_nf4,
    to_nf4,
)
from manylora_worker.models.quantized.schemes import Scheme
from manylora_worker.models.quantized.shipped import Paths, check_modules, read_shipped
from manylora_worker.models.quantized.stacks import KERNELS_INPUTS, QuantizedStack, put_stack, stacks_in
from manylora_worker.models.ranks.group import RankGroup


def from_shipped(
    folder: Path,
    scheme: Scheme,
    config: PretrainedConfig,
    dtype: torch.dtype,
    loading: Mapping[str, Any],
    *,
    keeps_codes: bool,
) -> tuple[PreTrainedModel, dict[str, Any], ShippedCodes | None]:
    """The model, what transformers says of the loading, and codes. Raises SchemeRefused."""
    # `loading` are options of from_pretrained. Experts that are kept in codes are in the model already.
    with torch.device("meta"):
        empty = class_of(config).from_config(config)  # AutoModel reads folders alone
    kind, own_config = type(empty), empty.config
    text = text_path(empty) if config.get_text_config() is not config else ""
    paths = Paths(
        whole_names(config, empty), tuple(kind._keys_to_ignore_on_load_unexpected or ()), renamings(empty), text
    )
    mixtures = find_experts(empty)
    experts = {each.stack: each.shape for each in mixtures if not each.shape.in_turn}
    shipped = read_shipped(weight_files(folder), scheme, dtype, keeps_codes=keeps_codes, paths=paths, experts=experts)
    model, told = kind.from_pretrained(None, config=own_config, dtype=dtype, state_dict=shipped.tensors, **loading)
    linears = frozenset(linear_modules(model)) - head_modules_of(model)
    routers = frozenset(each.router for each in mixtures if each.router_name)
    if scheme.kind == "mxfp4":
        linears = frozenset(each.stack for each in mixtures)
    else:
        linears |= modules_of(mixtures).keys() - routers
    check_modules(scheme, shipped.quantized, linears, routers, paths)
    for name, parts in shipped.stacks.items():
        path, _, leaf = name.rpartition(".")
        put_stack(model.get_submodule(path), leaf, QuantizedStack(parts, scheme.inputs_of_scale, dtype))
    told["unexpected_keys"] = set(told["unexpected_keys"]) - shipped.zero_biases
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, told, ShippedCodes(shipped.codes, scheme.inputs_of_scale) if keeps_codes else None


def bitsandbytes_options(config: PretrainedConfig, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Of from_pretrained, for NF4. Raises ModelRefused."""
    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
    }
    options: dict[str, Any] = {"device_map": {"": device}}
    stated = getattr(config, "quantization_config", None)
    with torch.device("meta"):
        empty = class_of(config).from_config(config)
    if stated is None:
        left = [*get_keys_to_not_convert(empty), *router_linears(empty)]
        return options | {"quantization_config": BitsAndBytesConfig(**nf4, llm_int8_skip_modules=left)}
    mixtures = find_experts(empty)
    if mixtures:
        raise ModelRefused(
            f"{config.model_type}: {mixtures[0].stack}: a mixture of experts that bitsandbytes has quantized is not "
            "served: take the model's unquantized weights with --quantization nf4, which quantizes them as it loads"
        )
    stated["bnb_4bit_compute_dtype"] = nf4["bnb_4bit_compute_dtype"]  # its weights are in 4 bits already
    return options


def keep_as_made(model: PreTrainedModel) -> None:
    # On some CPUs bitsandbytes repacks weights at their first use, with rounded scales and not for every shape.
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def to_device_but_linears(model: PreTrainedModel, device: torch.device) -> None:
    """All but what `quantize` takes there one by one: a device need not have all layers as they were."""
    # A mixture's block goes whole: it is tried before.
    blocks, heads = tuple(f"{found.path}." for found in find_experts(model)), head_modules_of(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or path in heads or path.startswith(blocks):
            module._apply(lambda tensor: tensor.to(device), recurse=False)


def experts_to_nf4(model: PreTrainedModel, by: torch.device, on: torch.device) -> None:
    """by: the device that computes; on: the one that keeps them. Raises ModelRefused."""
    # On the way to a device, which so never has them all as they were. gpt-oss's are to be turned first: it has them.
    for found in find_experts(model):
        experts = model.get_submodule(found.stack)
        for name, stack in stacks_in(experts).items() if not found.shape.in_turn else ():
            assert isinstance(stack, Tensor)
            put_stack(experts, name, to_nf4(f"{found.stack}.{name}", stack.data, by, on))


def quantize(
    model: PreTrainedModel,
    quantization: Quantization,
    codes: ShippedCodes | None,
    group: RankGroup | None,
    device: torch.device,
) -> None:
    """device: where the model is to be, but for bitsandbytes' layers, which are there."""
    if quantization == "none" or (quantization == "nf4" and device.type != "cuda"):
        return
    if quantization == "nf4":
        quantize_to_nf4(model, device)
    if quantization == "fp8":
        quantize_to_fp8(model, codes, device, group)
    if quantization == "int4":
        assert codes is not None
        keep_int4(model, codes, device)
    model.to(device)


def check_experts(model: PreTrainedModel, quantization: Quantization, strange: Sequence[str]) -> None:
    """strange: paths of experts that are not ours. Raises ModelRefused."""
    model_type = model.config.model_type
    stacks = ((path, each) for path in strange for each in stacks_in(model.get_submodule(path)).values())
    path = next((path for path, each in stacks if len(each.shape) > 2), "")
    if quantization != "none" and path:
        raise ModelRefused(f"{model_type}: --quantization {quantization}: {path} are no experts as we know them")
    for path, module in model.named_modules():
        if isinstance(module, QuantizedStack) and model.device.type == "cuda" and not module.has_kernel:
            raise ModelRefused(
                f"{path}: groups of {module.group_size} inputs: experts take multiples of {KERNELS_INPUTS} on a GPU "
                f"(start without --quantization {quantization}: weights are rebuilt)"
            )
