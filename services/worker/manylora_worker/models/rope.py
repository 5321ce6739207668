"""What a base model's configuration says of rotating positions, and an adapter's own frequencies in their place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from manylora_shared.stores.adapter_rope import BaseRope, RopeScaling
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manylora_worker.models.decoder.rotation_check import RotationCheck

_DYNAMIC = "dynamic"
_ORIGINAL = "original_max_position_embeddings"
QUERY_SCALING = "llama_4_scaling_beta"
UNREAD = "the base model runs as transformers wrote it, with its own rotation alone"


def base_rope(config: PretrainedConfig, longest_tokens: int, *, is_read: bool, rotates_all: bool = True) -> BaseRope:
    """config: of the text part. is_read: whether a decoder of our own runs it. rotates_all: each layer rotates."""
    own: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    problem = "" if is_read else UNREAD
    if not own:
        problem = "the base model does not rotate positions"
    elif any(isinstance(each, Mapping) for each in own.values()):
        problem = "the base model rotates positions differently by kind of layer"
    elif own.get(QUERY_SCALING) and is_read:
        problem = "the base model scales queries by their position"
    elif not rotates_all and is_read:
        problem = "some of the base model's layers do not rotate positions"
    original = own.get(_ORIGINAL) or getattr(config, "max_position_embeddings", 0)
    plain = {name: each for name, each in own.items() if isinstance(each, str | bool | int | float)}
    return BaseRope(plain, int(original or 0), longest_tokens, problem, RotationCheck(pickle.dumps(config)))


def scaled_frequencies(config: PretrainedConfig, scaling: RopeScaling, device: torch.device) -> tuple[Tensor, float]:
    """([rotated / 2] float32, the factor of cosine and sine), as transformers computes them.

    `dynamic` has those of a full context at every length: frequencies that follow the longest sequence of a batch would
    let one request change another's answer.
    """
    stretched = copy.deepcopy(config)
    original = stretch(stretched, scaling)
    kind, factor = (dict(scaling.parameters)[name] for name in ("rope_type", "factor"))
    full = round(original * float(factor)) if kind == _DYNAMIC else None
    frequencies, scale = ROPE_INIT_FUNCTIONS[str(kind)](stretched, device, seq_len=full)
    return frequencies.float(), float(scale)


def stretch(config: PretrainedConfig, scaling: RopeScaling) -> int:
    """The configuration of a model that rotates so. Returns the original context's length."""
    parameters, own = dict(scaling.parameters), config.rope_parameters
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
    original = int(parameters.get(_ORIGINAL) or own.get(_ORIGINAL) or config.max_position_embeddings)
    # transformers' dynamic takes the original's length from here
    is_dynamic = parameters["rope_type"] == _DYNAMIC
    config.max_position_embeddings = original if is_dynamic else scaling.max_context_tokens
    config.rope_parameters = {**kept, _ORIGINAL: original, **parameters}
    return original
