"""What a base model hands to its attention: one pass in which a recorder stands in for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manylora_worker.models.checkpoint import ModelRefused, max_context_tokens, said
from manylora_worker.models.layers.attention import STEP_KEYWORD, Recurs
from manylora_worker.models.layers.kv_cache import KvGeometry, StateGeometry

_ATTENTION_KEYWORDS_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "cache_position", "position_embeddings"})


@dataclass(frozen=True)
class AttentionTraits:
    """What a layer hands to its attention beside the tensors."""

    num_heads: int
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    rotates: bool  # whether a position changes what is attended to
    sinks: Tensor | None = None  # see attention.Attends


@dataclass
class _Recorder:
    """Stands in for the attention in the probing pass. See attention.Attends."""

    # layer -> (kv heads, key head dim, value head dim)
    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)  # layer -> itself, or that whose keys and values it has
    handed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    traits: dict[int, AttentionTraits] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    recurring: list[int] = field(default_factory=list)

    def recur(self, net: Recurs, hidden_states: Tensor) -> Tensor:
        self.recurring.append(net.index)
        return torch.zeros_like(hidden_states)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            self.problems.append(f"attention of {type(module).__name__} has no layer index of its own")
            layer = -len(self.problems)
        if not getattr(module, "is_causal", True):
            self.problems.append(f"{type(module).__name__} attends in both directions")
        effective = {k: v for k, v in others.items() if k not in _ATTENTION_KEYWORDS_WITHOUT_EFFECT}
        strange = sorted(k for k, v in effective.items() if isinstance(v, Tensor) or v)
        if strange:
            self.problems.append(f"its attention uses {', '.join(strange)}, which is not supported")
        same = (i for i, (keys, values) in self.handed.items() if keys is key and values is value)
        self.sources[layer] = next(same, layer)
        self.handed[layer] = (key, value)
        self.layers[layer] = (key.shape[1], key.shape[3], value.shape[3])
        self.traits[layer] = AttentionTraits(query.shape[1], scaling, sliding_window, softcap, _rotates(key), sinks)
        _, num_heads, num_rows, _ = query.shape
        return query.new_zeros(1, num_rows, num_heads, value.shape[3])


def _rotates(key: Tensor) -> bool:
    """key: [1, kv_heads, 2, head_dim], of one token at two positions."""
    here, there = key[0, :, 0].float(), key[0, :, 1].float()
    return bool((here - there).norm() > 1e-2 * here.norm()) or not here.any()


@dataclass(frozen=True)
class Probe:
    kv: KvGeometry
    vocab_size: int
    attention_traits: Sequence[AttentionTraits]


def _passed(model: PreTrainedModel, token_ids: Sequence[int], positions: Sequence[int], recorder: _Recorder) -> Any:
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor([token_ids], device=model.device),
            position_ids=torch.tensor([positions], device=model.device),
            use_cache=False,
            **{STEP_KEYWORD: recorder},
        )


def tokens_read(model: PreTrainedModel) -> Mapping[int, int] | None:
    """Of a model of more than text: tokens that it reads as others (those of images as padding, where there are none).
    None: not known.
    """
    config, embeddings = model.config, model.get_input_embeddings()
    if config.get_text_config() is config:
        return {}
    values = (value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index")))
    named = sorted({each for each in values if isinstance(each, int) and 0 <= each < embeddings.num_embeddings})
    if not named:
        return {}
    named *= 2 if len(named) == 1 else 1  # a recorder looks at two positions
    read: list[list[int]] = []
    hook = embeddings.register_forward_pre_hook(lambda _, given: read.append(given[0].flatten().tolist()))
    try:
        _passed(model, named, range(len(named)), _Recorder())
    finally:
        hook.remove()
    if [len(each) for each in read] != [len(named)]:
        return None
    return {token: seen for token, seen in zip(named, read[0], strict=True) if token != seen}


def probe(model: PreTrainedModel, state: StateGeometry | None = None) -> Probe:
    """state: of its recurrent layers. Raises ModelRefused."""
    recorder = _Recorder()
    label, config = f"{type(model).__name__}", model.config.get_text_config()
    num_recurring = 0 if state is None else state.num_layers
    num_layers = config.num_hidden_layers - num_recurring
    if num_layers < 1:
        raise ModelRefused(f"{label}: none of its layers attends: what is kept of a sequence is keys and values first")
    # Of the positions, the first and the last: where a long context stretches the rotation, its first steps are small.
    positions = [0, max(1, max_context_tokens(config) - 1)]
    try:
        # not 0: an embedding of padding may be zeroes, which no position changes
        output = _passed(model, [config.vocab_size // 2] * 2, positions, recorder)
    except (TypeError, KeyError, AttributeError) as error:  # its code looks into what we replaced, or drops keywords
        raise ModelRefused(
            f"{label}: does not work with other linear layers, or does not hand keywords on to its attention ({error})"
        ) from error
    except (ValueError, IndexError, RuntimeError, AssertionError) as error:  # it wants what no request brings
        raise ModelRefused(f"{label}: its pass over two tokens fails ({said(error)})") from error
    if sorted(recorder.recurring) != list(range(num_recurring)):
        recorder.problems.append(f"{len(recorder.recurring)} of {num_recurring} recurrent layers are gone through")
    if sorted(recorder.layers) != list(range(num_layers)):
        recorder.problems.append(
            f"{len(recorder.layers)} of {num_layers} layers go through transformers' attention interface"
        )
    shapes = set(recorder.layers.values())
    if any(key_dim != value_dim for _, key_dim, value_dim in shapes):
        recorder.problems.append(f"keys and values have different head sizes: {sorted(shapes)}")
    if recorder.problems:
        raise ModelRefused(f"{label}: " + "; ".join(dict.fromkeys(recorder.problems)))
    layers = range(num_layers)
    return Probe(
        KvGeometry.of([recorder.layers[i][:2] for i in layers], [recorder.sources[i] for i in layers], state),
        vocab_size=output.logits.shape[-1],
        attention_traits=[recorder.traits[i] for i in range(num_layers)],
    )
