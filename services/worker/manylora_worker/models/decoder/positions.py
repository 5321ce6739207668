"""What a model makes of positions: tables of its rotations, and factors of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.rope import QUERY_SCALING

_RECURRENT = "linear_attention"


def rope_tables(
    loaded: LoadedModel, rotary: nn.Module | None, config: Any
) -> tuple[list[tuple[Tensor, Tensor]], Callable[[int, int], int]] | None:
    """One table for all layers or one a layer type, one more where layers do not rotate, and the index of each layer's,
    by its own index and that among the layers that attend. rotary: None: no layer rotates. Returns None where it gives
    no cosines and sines, or none for a kind of layer.
    A context may be longer than the model's with an adapter alone, whose own rotation stands in the last angle's place.
    """
    positions = torch.arange(loaded.spec.max_context_tokens, device=loaded.device)[None]
    if hasattr(rotary, "mrope_section"):  # of time, height and width, which are the same in a text
        positions = positions.expand(3, 1, -1)
    like = torch.empty(1, dtype=torch.float32, device=loaded.device)
    missing = loaded.spec.longest - loaded.spec.max_context_tokens
    types = getattr(rotary, "layer_types", None)

    def table(*layer_type: str) -> tuple[Tensor, Tensor] | None:
        if rotary is None:
            still = torch.zeros(loaded.spec.longest, loaded.spec.kv.places[0].head_dim // 2, device=loaded.device)
            return still + 1, still
        with torch.inference_mode():
            found = rotary(like, positions, *layer_type)
        if not isinstance(found, tuple):  # complex numbers, as DeepSeek-V2 has them
            return None
        cos, sin = found
        if cos.dim() == 4:  # one of time, of height and of width
            cos, sin = cos[0], sin[0]
        is_half = cos.shape[-1] == len(getattr(rotary, "inv_freq", ()))  # gpt-oss has each angle once
        half = cos.shape[-1] if is_half else cos.shape[-1] // 2
        return _lengthened(cos[0, :, :half], missing), _lengthened(sin[0, :, :half], missing)

    names = [] if types is None else list(types)
    found_tables = [table(name) for name in names] or [table()]
    tables = [each for each in found_tables if each is not None]
    if len(tables) < len(found_tables):
        return None
    rotates = [traits.rotates for traits in loaded.attention_traits]
    if names:
        attending = [each for each in config.layer_types if each != _RECURRENT]
        if len(attending) != len(rotates):
            return None
        if any(turns and kind not in names for kind, turns in zip(attending, rotates, strict=True)):
            return None
    if rotary is not None and not all(rotates):
        cos, sin = tables[0]
        tables.append((torch.ones_like(cos), torch.zeros_like(sin)))

    def table_of(layer: int, attending: int) -> int:
        if not rotates[attending]:
            return len(tables) - 1
        return names.index(config.layer_types[layer]) if names else 0

    return tables, table_of


def query_scales(loaded: LoadedModel, config: Any) -> Tensor | None:
    """[positions] float32, as Ministral 3 has them: 1 + beta * log(1 + floor(position / original context))."""
    own = getattr(config, "rope_parameters", None) or {}
    beta = own.get(QUERY_SCALING)
    if not beta:
        return None
    positions = torch.arange(loaded.spec.longest, device=loaded.device)
    return 1 + beta * torch.log(1 + torch.floor(positions / own["original_max_position_embeddings"]))


def _lengthened(table: Tensor, rows: int) -> Tensor:
    return torch.cat((table, table[-1:].expand(rows, -1))).contiguous()
