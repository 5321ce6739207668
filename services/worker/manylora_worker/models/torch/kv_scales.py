"""At load, for keys and values that are kept in FP8: a power of two a layer, from one pass over a few tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.attention import STEP_KEYWORD
from manylora_worker.models.layers.fp8_codes import FP8_LARGEST
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.quantized.install import check_device
from manylora_worker.models.torch.inputs import one_chunk

_LOG = logging.getLogger(__name__)
_TOKENS = 64
_ROOM = 16  # times what the pass finds: other texts and adapters make larger ones


class _Watched(KvCache):
    largest: Tensor  # [layers, 2], of keys and of values

    def write(self, layer: int, token_rows: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.largest[layer] = torch.stack([keys.abs().max(), values.abs().max()])
        return super().write(layer, token_rows, keys, values)


def with_fp8_kv(loaded: LoadedModel) -> LoadedModel:
    """Raises ModelRefused."""
    check_device(loaded.device, "--kv-cache-dtype fp8", "--kv-cache-dtype auto")
    found = _largest(loaded)
    if not all(math.isfinite(each) for pair in found for each in pair):
        raise ModelRefused(f"{loaded.spec.model_type}: --kv-cache-dtype fp8: it has keys or values that are no numbers")
    scales = tuple((_scale(keys), _scale(values)) for keys, values in found)
    for what, largest, own in zip(("keys", "values"), zip(*found, strict=True), zip(*scales, strict=True), strict=True):
        layer = max(range(len(largest)), key=largest.__getitem__)
        _LOG.info(
            "KV in FP8: %s of up to %.3g (layer %d) in a pass over %d tokens; scales of %g to %g; what is more than %d "
            "times as large as its layer's largest may be cut off",
            what, largest[layer], layer, _tokens(loaded), min(own), max(own), _ROOM,
        )  # fmt: skip
    return replace(loaded, spec=replace(loaded.spec, kv=replace(loaded.spec.kv, scales=scales)))


def _scale(largest: float) -> float:
    # the least power of two by which _ROOM times that has a code
    return 2.0 ** math.ceil(math.log2(largest * _ROOM / FP8_LARGEST)) if largest > 0 else 1.0


def _tokens(loaded: LoadedModel) -> int:
    return min(_TOKENS, loaded.spec.max_context_tokens)


def _largest(loaded: LoadedModel) -> Sequence[tuple[float, float]]:
    """By layer, of keys and of values; of all ranks' where they share the model."""
    count, kv, device = _tokens(loaded), loaded.spec.kv, loaded.device
    num_blocks = 1 + kv.state_blocks(count, loaded.dtype)
    cache = _Watched(kv, num_blocks=num_blocks, block_size=count, dtype=loaded.dtype, device=device)
    cache.largest = torch.zeros(len(kv.places), 2, dtype=loaded.dtype, device=device)
    rows, step = torch.arange(count, device=device), one_chunk(cache)
    token_ids = (7 + rows * max(1, loaded.spec.vocab_size // count)) % loaded.spec.vocab_size
    with torch.inference_mode():
        loaded.model(input_ids=token_ids[None], position_ids=rows[None], use_cache=False, **{STEP_KEYWORD: step})
        if loaded.group is not None:
            loaded.group.largest(cache.largest)
    found: list[tuple[float, float]] = [tuple(pair) for pair in cache.largest.float().tolist()]
    return found
