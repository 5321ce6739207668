"""Which outputs of a gated delta net's inputs a rank has, and in which order."""

# As the kernels take them: queries, keys, values, gates, beta, decay, each by heads. A rank has some heads of keys, and
# the heads of values that go with them. Qwen3-Next's checkpoints have these outputs key head by key head: their rows
# are put in order once, at load, also where there is one rank.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.delta_net import find_delta_nets
from manylora_worker.models.quantized.install import ShippedCodes
from manylora_worker.models.ranks.own_rows import cut_outputs, own_parameter, own_rows

_BY_HEAD = frozenset({"in_proj_qkvz", "in_proj_ba"})  # a head's parts stand side by side
_HEADS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")


def delta_outputs(path: str, config: PretrainedConfig, rank: int = 0, size: int = 1) -> tuple[range, ...]:
    """Empty: it is no such layer."""
    text, leaf = config.get_text_config(), path.rpartition(".")[2]
    count = getattr(text, "linear_num_key_heads", None)
    widths = _widths(text, count).get(leaf) if count else None
    if not count or widths is None:
        return ()
    starts = [0, *accumulate(widths)]
    own = range(rank * (count // size), (rank + 1) * (count // size))
    if leaf not in _BY_HEAD:
        return tuple(
            range(count * start + own.start * width, count * start + own.stop * width)
            for start, width in zip(starts, widths, strict=False)
        )
    return tuple(
        range(head * starts[-1] + start, head * starts[-1] + start + width)
        for start, width in zip(starts, widths, strict=False)
        for head in own
    )


def _widths(text: PretrainedConfig, key_heads: int) -> Mapping[str, tuple[int, ...]]:
    # what a head of keys has of a layer's outputs, part by part
    heads = text.linear_num_value_heads // key_heads
    key, values = text.linear_key_head_dim, heads * text.linear_value_head_dim
    return {
        "in_proj_qkv": (key, key, values), "in_proj_z": (values,), "in_proj_b": (heads,), "in_proj_a": (heads,),
        "in_proj_qkvz": (key, key, values, values), "in_proj_ba": (heads, heads),
    }  # fmt: skip


def reordered(path: str, config: PretrainedConfig) -> tuple[range, ...]:
    """Outputs of a layer that is whole here; empty: they stay as they are."""
    return delta_outputs(path, config) if path.rpartition(".")[2] in _BY_HEAD else ()


def cut_delta_nets(model: PreTrainedModel, rank: int = 0, size: int = 1) -> None:
    """All but `out_proj`. Works on meta tensors. Raises ModelRefused."""
    for path, net in find_delta_nets(model).items():
        layer: Any = net
        is_by_head = hasattr(layer, "in_proj_qkvz")
        if size == 1 and not is_by_head:
            continue
        for name, linear in layer.named_children():
            own = delta_outputs(name, model.config, rank, size)
            if own and type(linear) is not nn.Linear:  # one code stands for what is in several rows
                raise ModelRefused(f"{path}.{name}: not with --quantization nf4 on the CPU: its rows are put in order")
            if own:
                cut_outputs(linear, own)
        if size > 1:
            _cut_heads(layer, model.config, rank, size)
        if is_by_head:
            layer.fix_query_key_value_ordering = partial(_apart, layer)


def _cut_heads(layer: Any, config: PretrainedConfig, rank: int, size: int) -> None:
    cut_outputs(layer.conv1d, delta_outputs("in_proj_qkv", config, rank, size))
    heads = delta_outputs("in_proj_a", config, rank, size)
    layer.A_log, layer.dt_bias = own_parameter(layer.A_log, heads), own_parameter(layer.dt_bias, heads)
    for name in _HEADS:
        setattr(layer, name, getattr(layer, name) // size)


def _apart(layer: Any, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
    # in the place of what transformers' pass takes the checkpoint's order apart by
    query, key, value, z = qkvz.split((layer.key_dim, layer.key_dim, layer.value_dim, layer.value_dim), -1)
    b, a = ba.chunk(2, -1)
    return query, key, value, z.unflatten(-1, (-1, layer.head_v_dim)), b, a


def codes_in_order(shipped: ShippedCodes, config: PretrainedConfig) -> ShippedCodes:
    # of a model that is whole here
    orders = {path: reordered(path, config) for path in shipped.by_path}
    moved = {path: tuple(own_rows(each, own) for each in shipped.by_path[path]) for path, own in orders.items() if own}
    return replace(shipped, by_path={**shipped.by_path, **moved})
