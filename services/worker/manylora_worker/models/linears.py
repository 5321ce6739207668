"""A base model's linear layers, and putting ours in their place: with LoRA, fused, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from manylora_worker.models.layers.delta_net import DELTA_INPUTS
from manylora_worker.models.layers.lora_linear import FusedMember, FusedProjection, LoraLinear, LoraSwitch
from manylora_worker.models.layers.packed_linear import WORTH_PACKING, PackedLinear
from manylora_worker.models.ranks.cuts import is_summed, own_outputs
from manylora_worker.models.ranks.delta_cuts import cut_delta_nets, reordered
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.weights.sites import Site, Slot

# Module name -> groups of its linear layers that read the same input and become one product, in the families below. An
# absent family runs as it is (phi3 fuses its projections itself). Only this module names families: one probing pass
# learns what else a model does differently (windows, soft caps, scales, head counts). A recorder stands in for the
# attention and notes what each layer hands over.
_FUSED: Mapping[str, Sequence[Sequence[str]]] = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj")),
    "mlp": (("gate_proj", "up_proj"),),
    "shared_expert": (("gate_proj", "up_proj"),),
    "shared_experts": (("gate_proj", "up_proj"),),
    "linear_attn": DELTA_INPUTS,
}
FUSED_FAMILIES = frozenset(
    {
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
        *("granite", "granitemoehybrid", "smollm3", "exaone4", "olmo2", "olmo3", "seed_oss", "qwen3_moe", "gpt_oss"),
        *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
        *("mixtral", "olmoe", "qwen2_moe", "cwm", "glm4_moe", "dots1"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma4_text"),
    }
)


def linear_modules(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Path -> (in, out), the head included."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):  # bitsandbytes' Linear4bit is one
            found[path] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            found[path] = (module.nx, module.nf)
    return found


def head_modules_of(model: PreTrainedModel) -> set[str]:
    """What comes before the layers or behind them: there rows are not a step's, but those whose logits are wanted."""
    heads = [model.get_input_embeddings(), model.get_output_embeddings()]
    body = {id(module) for module in model.base_model.modules()}
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        or any(module is head for head in heads)
        or (isinstance(module, nn.Linear | Conv1D) and id(module) not in body)
    }


def install_linears(
    model: PreTrainedModel,
    modules: Mapping[str, tuple[int, int]],
    switch: LoraSwitch,
    *,
    fused: bool,
    group: RankGroup | None,
) -> list[Site]:
    # every linear layer except the head becomes a LoraLinear, fused where the table says so
    if group is None:
        cut_delta_nets(model)
    heads = head_modules_of(model)
    roles = _FUSED if fused and model.config.get_text_config().model_type in FUSED_FAMILIES else {}

    def own(path: str) -> tuple[range, ...]:
        if group is None:
            return reordered(path, model.config)
        return own_outputs(path, modules[path][1], model.config, group)

    sites: list[Site] = []
    done: set[str] = set(heads)
    for path in [path for path, _ in model.named_modules()]:  # a list of modules would keep all weights to its end
        for members in roles.get(path.rpartition(".")[2], ()):
            there = {name for name, _ in model.get_submodule(path).named_children() if f"{path}.{name}" not in done}
            if not set(members) <= there:
                continue  # a layer of experts, whose family has plain ones, too, or one whose keys are its values
            outputs = [own(f"{path}.{member}") for member in members]
            sites.append(_fuse(model.get_submodule(path), path, members, len(sites), switch, outputs))
            done |= {f"{path}.{member}" for member in members}
    for path, (in_features, _) in modules.items():
        if path not in done:
            parent_path, _, leaf = path.rpartition(".")
            parent = model.get_submodule(parent_path)
            linear = getattr(parent, leaf)
            here = linear_modules(parent)[leaf]
            first_input = group.rank * here[0] if group is not None and here[0] < in_features else 0
            site = Site(len(sites), here[0], (Slot(path, 0, here[1], own(path)),), first_input)
            reduce = group.all_reduce if group is not None and is_summed(path) else None
            setattr(parent, leaf, LoraLinear(linear, site, switch, reduce))
            sites.append(site)
    return sites


def _fuse(
    parent: nn.Module,
    parent_path: str,
    members: Sequence[str],
    index: int,
    switch: LoraSwitch,
    outputs: Sequence[tuple[range, ...]],
) -> Site:
    """Replaces `members` by one product over the same input, and frees their weights. outputs: Slot.outputs of each."""
    layers = [getattr(parent, member) for member in members]
    biases = [layer.bias for layer in layers]
    assert all(type(layer) is nn.Linear for layer in layers)
    fused = nn.Linear(1, 1, bias=False, device="meta")
    fused.in_features = layers[0].in_features
    fused.out_features = sum(layer.out_features for layer in layers)
    fused.weight = nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
    if any(bias is not None for bias in biases):
        parts = [
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers
        ]
        fused.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    slots = []
    start = 0
    for member, layer, own in zip(members, layers, outputs, strict=True):
        slots.append(Slot(f"{parent_path}.{member}", start, start + layer.out_features, own))
        start += layer.out_features
    site = Site(index, fused.in_features, tuple(slots))
    projection = FusedProjection(LoraLinear(fused, site, switch))
    for i, member in enumerate(members):
        setattr(parent, member, FusedMember(projection, i))
    return site


def pack_linears(model: PreTrainedModel) -> None:
    # the head too: a copy, where it shares the embeddings' weight
    for path in [path for path, _ in model.named_modules()]:
        module = model.get_submodule(path)
        if type(module) is nn.Linear and module.weight.numel() >= WORTH_PACKING:
            parent_path, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent_path), leaf, PackedLinear(module.weight, module.bias))
