"""A model's layers that keep a state."""

from __future__ import annotations

from torch import nn

from manylora_worker.models.layers.delta_net import DeltaNet, find_delta_nets
from manylora_worker.models.layers.kv_cache import StateGeometry
from manylora_worker.models.layers.mamba import Mamba, find_mambas

_KINDS = ((DeltaNet, find_delta_nets), (Mamba, find_mambas))


def find_recurrent(model: nn.Module) -> list[tuple[type[DeltaNet] | type[Mamba], nn.Module]]:
    return [(kind, module) for kind, find in _KINDS for module in find(model).values()]


def install_recurrent(model: nn.Module) -> StateGeometry | None:
    """None: it has none. What attends and what recurs is numbered each for itself: KV is for the one, state for the
    other.
    """
    layers = [kind(module, index) for index, (kind, module) in enumerate(find_recurrent(model))]
    if not layers:
        return None
    attending = [module for name, module in model.named_modules() if name.endswith(".self_attn")]
    for index, module in enumerate(attending):
        module.layer_idx = index  # type: ignore[assignment]
    shape = layers[0].shape
    matrices = (shape.value_heads, shape.key_dim, shape.value_dim)
    return StateGeometry(num_layers=len(layers), matrices=matrices, window=(shape.channels, shape.window))
