"""How a model is cut for its ranks: which share of each matrix one has.

Layers that read the residual stream are cut by their outputs (whole heads; columns of gate and up), those that write
it by their inputs, so a decoder layer sums twice over the ranks. An adapter is cut alike (weights/packing.py): its
share of an output joins the layer's own sum. The output head is cut by the vocabulary and gathered: whole on each rank
it would be a tenth of what a step reads. Embeddings, norms and routers are whole. Of fused layers each part is cut by
itself, and so is each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.quantized.install import ShippedCodes
from manylora_worker.models.quantized.stacks import QuantizedStack, stacks_in
from manylora_worker.models.ranks.delta_cuts import cut_delta_nets, delta_outputs
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.mamba_cuts import cut_mambas, mamba_outputs
from manylora_worker.models.ranks.own_rows import cut_outputs, frozen, own_rows
from manylora_worker.weights.layout import ALIGNMENT

# By name: a cut that is wrong is wrong in transformers' pass over it, too, so nothing at load would see it.
SHARED_FAMILIES = frozenset(
    {
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
        *("granite", "granitemoehybrid", "smollm3", "exaone4", "seed_oss", "phi3", "cwm", "qwen2_vl_text"),
        *("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"),
        *("glm4_moe", "dots1", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma4_text"),
    }
)
_QUERIES, _KEYS, _WIDTH = _COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_GRANITE_WIDTH = "shared_intermediate_size"
# what its outputs are, one part behind the other
_BY_OUTPUTS: Mapping[str, Sequence[str]] = {
    "q_proj": (_QUERIES,), "k_proj": (_KEYS,), "v_proj": (_KEYS,), "qkv_proj": (_QUERIES, _KEYS, _KEYS),
    "gate_proj": (_WIDTH,), "up_proj": (_WIDTH,), "gate_up_proj": (_WIDTH, _WIDTH),
    "input_linear": (_GRANITE_WIDTH, _GRANITE_WIDTH),
}  # fmt: skip
_BY_INPUTS = ("o_proj", "down_proj", "out_proj", "output_linear")
# of families that have them
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
# whose experts have the width that is a dense layer's elsewhere
_WIDE_EXPERTS = frozenset({"mixtral", "gpt_oss", "granitemoehybrid"})
_MAMBA_HEADS, _MAMBA_GROUPS = "mamba_n_heads", "mamba_n_groups"  # one group is on each rank
_DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def check_cuts(config: PretrainedConfig, size: int, families: frozenset[str]) -> None:
    """Raises ModelRefused. families: those whose layers are named and shaped as this module takes them to be."""
    text = config.get_text_config()
    if text.model_type not in families:
        raise ModelRefused(
            f"--tensor-parallel {size}: model_type {text.model_type} is not one that can be shared among ranks "
            f"({', '.join(sorted(families))})"
        )
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    names = (*_COUNTS, _GRANITE_WIDTH, *_DELTA_HEADS)
    counts = [(name, getattr(each, name, None) or 0) for each in layers for name in names]
    if getattr(text, _MAMBA_HEADS, 0) and "linear_attention" in (text.layer_types or ()):
        groups = getattr(text, _MAMBA_GROUPS)
        counts += [(_MAMBA_HEADS, getattr(text, _MAMBA_HEADS)), (_MAMBA_GROUPS, 0 if groups == 1 else groups)]
    odd = list(dict.fromkeys(f"{name} {count}" for name, count in counts if count % size))
    are_wide = text.model_type in _WIDE_EXPERTS and text.num_local_experts
    for name in (*_EXPERT_WIDTHS, *([_WIDTH] if are_wide else [])):
        width = vars(text).get(name) or 0
        if width % (size * ALIGNMENT):  # an adapter's matrices of experts stand one behind the other
            odd.append(f"{name} {width} into multiples of {ALIGNMENT}")
    if odd:
        raise ModelRefused(f"--tensor-parallel {size}: does not divide {' and '.join(odd)}")


def own_outputs(path: str, outputs: int, config: PretrainedConfig, group: RankGroup) -> tuple[range, ...]:
    """Which of the outputs of a layer this rank has, part by part."""
    place = (path, config, group.rank, group.size)
    of_state = delta_outputs(*place) or mamba_outputs(*place)
    if of_state:
        return of_state
    names = _BY_OUTPUTS.get(path.rpartition(".")[2])
    return (range(outputs),) if names is None else tuple(_own_parts(names, outputs, config.get_text_config(), group))


def _own_parts(names: Sequence[str], outputs: int, text: PretrainedConfig, group: RankGroup) -> Iterator[range]:
    # What the configuration does not have (a dense width in a mixture, numbers that differ by layer) has equal parts.
    counts = [vars(text).get(name, 1) for name in names]
    first = 0
    for count in counts:
        part = outputs * count // sum(counts)
        own = part // group.size
        yield range(first + group.rank * own, first + (group.rank + 1) * own)
        first += part


def is_summed(path: str) -> bool:
    """Whether the outputs of this layer's shares are added up."""
    return path.rpartition(".")[2] in _BY_INPUTS


def cut_linears(model: PreTrainedModel, group: RankGroup) -> None:
    """Leaves this rank's share of every linear layer but the head, and of experts. Works on meta tensors."""
    cut_delta_nets(model, group.rank, group.size)
    cut_mambas(model, group)
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if hasattr(module, "qkv_proj"):  # it takes the product apart by these
            module.config = _OwnHeads(model.config.get_text_config(), group.size)
            module.num_key_value_heads //= group.size
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            module.sinks = frozen(module.sinks.data.chunk(group.size)[group.rank].clone())
        if leaf == "experts" and hasattr(module, "down_proj_bias"):
            _cut_experts_in_turn(module, group)
        elif leaf == "experts":
            _cut_experts(path, module, model.config, group)
        elif isinstance(module, nn.Linear) and leaf in _BY_OUTPUTS:
            cut_outputs(module, own_outputs(path, module.out_features, model.config, group))
        elif isinstance(module, nn.Linear) and leaf in _BY_INPUTS:
            module.weight = frozen(_columns(module.weight.data, group))
            module.bias = module.bias if group.rank == 0 else None  # added once
            module.in_features //= group.size


def _cut_experts(path: str, experts: nn.Module, config: PretrainedConfig, group: RankGroup) -> None:
    for name, stack in stacks_in(experts).items():
        if isinstance(stack, QuantizedStack):
            setattr(experts, name, _stack_share(f"{path}.{name}", stack, config, group))
        elif is_summed(name):
            setattr(experts, name, frozen(stack.data.chunk(group.size, 2)[group.rank].clone()))
        else:
            own = own_outputs(f"{path}.{name}", stack.shape[1], config, group)
            setattr(experts, name, frozen(own_rows(stack.data, own, 1)))


def _cut_experts_in_turn(experts: nn.Module, group: RankGroup) -> None:
    """gpt-oss's: a column of the gate stands beside that of up."""
    for name, dim in (("gate_up_proj", 2), ("gate_up_proj_bias", 1), ("down_proj", 1)):
        setattr(experts, name, frozen(getattr(experts, name).data.chunk(group.size, dim)[group.rank].clone()))
    if group.rank:
        experts.down_proj_bias = frozen(torch.zeros_like(experts.down_proj_bias.data))  # added once


def _stack_share(path: str, stack: QuantizedStack, config: PretrainedConfig, group: RankGroup) -> QuantizedStack:
    """Raises ModelRefused."""
    if is_summed(path):
        flat = [each.flatten(0, 1) for each in stack.parts]
        share = _codes_share(path, flat, stack.group_size, group, in_blocks=stack.is_nf4)
        parts = [each.unflatten(0, stack.shape[:2]) for each in share]
    else:
        own = own_outputs(path, stack.shape[1], config, group)
        parts = [own_rows(each, own, 1) for each in stack.parts]
    return QuantizedStack(parts, stack.group_size, stack.dtype, is_nf4=stack.is_nf4)


class _OwnHeads:
    """A configuration as an attention of a rank's heads reads it; what is set in the model's is set here."""

    def __init__(self, config: PretrainedConfig, size: int) -> None:
        self._config = config
        self.num_attention_heads = config.num_attention_heads // size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def cut_codes(shipped: ShippedCodes, config: PretrainedConfig, group: RankGroup) -> ShippedCodes:
    """This rank's share, as of the weights. Raises ModelRefused where inputs that have one scale would be torn."""
    by_path: dict[str, tuple[Tensor, ...]] = {}
    for path, parts in shipped.by_path.items():
        if is_summed(path):
            by_path[path] = _codes_share(path, parts, shipped.inputs_of_scale, group)
        else:
            own = own_outputs(path, parts[0].shape[0], config, group)
            by_path[path] = tuple(own_rows(each, own) for each in parts)
    return replace(shipped, by_path=by_path)


def _codes_share(
    path: str, parts: Sequence[Tensor], size: int, group: RankGroup, *, in_blocks: bool = False
) -> tuple[Tensor, ...]:
    # `size` inputs have one scale, where not all have; in_blocks: no fewer ever have one
    codes, *scales = parts
    in_column = 2 if codes.dtype is torch.uint8 else 1  # of 4 bits
    inputs = codes.shape[1] * in_column
    mine = inputs // group.size
    has_groups = in_blocks or scales[0].shape[1] > 1
    if mine % in_column or (has_groups and mine % size):
        raise ModelRefused(
            f"--tensor-parallel {group.size}: {path}: {mine} of its {inputs} inputs a rank are no whole groups of "
            f"{size if has_groups else in_column}: start without --quantization, which takes whole weights"
        )
    return (_columns(codes, group), *(_columns(each, group) if has_groups else each for each in scales))


def cut_head(model: PreTrainedModel, group: RankGroup) -> None:
    head = model.get_output_embeddings()
    path = next(path for path, module in model.named_modules() if module is head)
    if type(head) is not nn.Linear or head.bias is not None:
        raise ModelRefused(f"--tensor-parallel {group.size}: {path} is not a linear layer without a bias")
    parent, _, leaf = path.rpartition(".")
    shared = SharedHead(head, group)
    if head.weight is not model.get_input_embeddings().weight:
        shared.part.weight.data = shared.part.weight.data.clone()  # a view would keep the other ranks' rows, too
    setattr(model.get_submodule(parent), leaf, shared)


def _columns(tensor: Tensor, group: RankGroup) -> Tensor:
    return tensor.chunk(group.size, 1)[group.rank].clone()


class SharedHead(nn.Module):
    """x: [..., hidden] -> [..., vocab], whole on every rank. Each computes as many columns; the last rank's may end in
    columns of zeroes that there are no tokens for.
    """

    def __init__(self, head: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
        self.part_features = -(-head.out_features // group.size)
        self.group = group
        first = group.rank * self.part_features
        weight = head.weight.data[first : first + self.part_features]
        missing = self.part_features - weight.shape[0]
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, head.in_features)])
        self.part = nn.Linear(1, 1, bias=False, device="meta")
        self.part.in_features, self.part.out_features = head.in_features, self.part_features
        self.part.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        part = self.part(x).view(-1, self.part_features)
        out = part.new_empty(part.shape[0], self.out_features)
        self.group.gather_columns(part, part.new_empty(self.group.size, *part.shape), out)
        return out.view(*x.shape[:-1], self.out_features)
