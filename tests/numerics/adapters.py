"""Adapters made and saved by peft, ranks 1 to 64, every way of choosing modules, ranks and scales that is honoured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache, PreTrainedModel

T = TypeVar("T")

FP8_SLACK = 0.1  # of logits
LEAST_MARGIN = 1e-5  # of a greedy token over the next best: a sum in another order moves logits by 1e-6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
PHI3_ATTENTION = ["qkv_proj", "o_proj"]
PHI3_MLP = ["gate_up_proj", "down_proj"]
GRANITE4_MLP = ["input_linear", "output_linear"]


def recipes(family: str) -> Mapping[str, Mapping[str, Any]]:
    """Adapter name -> LoraConfig arguments, for the family's module names."""
    attention, mlp = (PHI3_ATTENTION, PHI3_MLP) if family == "phi3" else (ATTENTION, MLP)
    if family == "granitemoehybrid" or family.startswith("granite4_h"):
        mlp = GRANITE4_MLP
    if family.startswith("granite4_h"):
        attention = [*ATTENTION[:-1], "in_proj", "out_proj", ATTENTION[-1]]
    if family.startswith("qwen3_5"):
        attention = [*ATTENTION[:-1], *DELTA_NET, ATTENTION[-1]]
    query, down = attention[0], mlp[-1]
    everything = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    return {
        "rank-1": {"r": 1, "lora_alpha": 2, "target_modules": attention + mlp},
        "all-linear": everything,
        "all-linear-b": everything,
        "all-linear-c": everything,
        "rslora": {"r": 64, "lora_alpha": 8, "target_modules": [query, down], "use_rslora": True},
        "patterns": {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": attention + mlp,
            "rank_pattern": {f"layers.1.self_attn.{query}": 9, down: 3},
            "alpha_pattern": {rf".*\.0\..*{query}": 11, down: 2.5},
            "use_rslora": True,
        },
        "regex": {"r": 13, "lora_alpha": 7, "target_modules": rf".*layers\.[02]\..*({query}|{mlp[0]})"},
        "some-layers": {
            "r": 32,
            "lora_alpha": 8,
            "target_modules": [attention[-1], mlp[0]],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
        "regex-b": {"r": 13, "lora_alpha": 2, "target_modules": rf".*layers\.[02]\..*({query}|{mlp[0]})"},
        "excluded": {"r": 2, "lora_alpha": 3, "target_modules": attention + mlp, "exclude_modules": [query, down]},
    }


def save_adapter(
    model: PreTrainedModel, folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, **arguments: Any
) -> Path:
    """Makes a random adapter for `model` with peft, saves it in `folder`, and leaves the model as it was."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
                parameter.data = parameter.data.to(dtype)
    wrapped.save_pretrained(folder, save_embedding_layers=False)  # "auto" would ask the hub
    wrapped.unload()
    return folder


class RoundingCache(DynamicCache):
    """Keeps keys and values as FP8 keeps them. scales: by layer that attends, of codes of keys and of values."""

    def __init__(self, config: Any, scales: Sequence[tuple[float, float]]) -> None:
        super().__init__(config=config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(scales)
        attending = [i for i, kind in enumerate(kinds) if kind != "linear_attention"]
        self._scales = dict(zip(attending, scales, strict=True))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *others: Any, **named: Any) -> Any:
        rounded = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
            for x, scale in zip((keys, values), self._scales[layer_idx], strict=True)
        ]
        return super().update(*rounded, layer_idx, *others, **named)


class Tie(Exception):
    """The greedy answer is not one that every right program gives."""


class Reference:
    """transformers + peft, one request at a time, adapters read from their folders."""

    def __init__(
        self, model: PreTrainedModel, folders: Mapping[str, Path], scales: Sequence[tuple[float, float]] = ()
    ) -> None:
        """scales: of keys and values in FP8, by layer: it attends to what is left of them."""
        self._scales = scales
        self._wrapped: PeftModel | PreTrainedModel = model
        for name, folder in folders.items():
            if isinstance(self._wrapped, PeftModel):
                self._wrapped.load_adapter(folder, name)
            else:
                self._wrapped = PeftModel.from_pretrained(self._wrapped, folder, adapter_name=name)

    def compose(self, name: str, weights: Mapping[str, float]) -> None:
        """The weighted sum of adapters, as peft makes it of further rows of rank."""
        if name not in self._wrapped.peft_config:
            self._wrapped.add_weighted_adapter(list(weights), list(weights.values()), name, combination_type="cat")

    def logits(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        """[tokens, vocab]"""
        return self._run(adapter, lambda model: model(torch.tensor([token_ids]), **self._cache()).logits[0].float())

    def greedy(self, token_ids: list[int], adapter: str | None, max_tokens: int) -> list[int]:
        """Raises Tie where the last bits of a sum decide."""
        prompt = torch.tensor([token_ids])
        options = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}

        def generate(model: PreTrainedModel) -> tuple[torch.Tensor, float]:
            found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options, **self._cache())
            best, next_best = torch.cat(found.logits).float().topk(2).values.unbind(1)
            return found.sequences[0, len(token_ids) :], float((best - next_best).min())

        answer, margin = self._run(adapter, generate)
        if margin < LEAST_MARGIN:
            raise Tie(f"a token of the greedy answer leads by {margin:.1e} alone: draw another prompt")
        return answer.tolist()

    def allows(self, token_ids: list[int], adapter: str | None, answer: list[int]) -> bool:
        """Whether the answer is the greedy one, or with keys and values in FP8 hardly less likely token by token: a
        code moves by a sixteenth of itself where the last bit of a device's sum does."""
        if not self._scales:
            return answer == self.greedy(token_ids, adapter, len(answer))
        rows = self.logits([*token_ids, *answer[:-1]], adapter)[len(token_ids) - 1 :]
        return all(float(row.max() - row[token]) < FP8_SLACK for row, token in zip(rows, answer, strict=True))

    def _cache(self) -> Mapping[str, Any]:
        config = self._wrapped.config.get_text_config()
        return {"past_key_values": RoundingCache(config, self._scales)} if self._scales else {}

    def _run(self, adapter: str | None, call: Callable[[Any], T]) -> T:
        with torch.no_grad():
            if not isinstance(self._wrapped, PeftModel):
                return call(self._wrapped)
            if adapter is None:
                with self._wrapped.disable_adapter():
                    return call(self._wrapped)
            self._wrapped.set_adapter(adapter)
            return call(self._wrapped)
