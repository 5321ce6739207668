"""Tokens whose rows of the embeddings or the head an adapter brings: beside other rows, as transformers and peft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.weights.layout import heard_extras, told_extras
from manylora_worker.weights.source import AdapterInvalid, read_adapter

from tests.numerics.adapters import Reference
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.test_columns import changed, reference, save_trained

TOLERANCE = 1e-4
IDS = [5, 9, 130]
TOKENS: dict[str, dict[str, Any]] = {
    "tokens": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "trainable_token_indices": IDS},
    "apart": {
        "r": 2,
        "target_modules": ["v_proj"],
        "use_dora": True,
        "trainable_token_indices": {"embed_tokens": [7, 5], "lm_head": IDS},
    },
}


def with_tokens(count: int, seed: int) -> list[list[int]]:
    return [[5, *prompt[:3], 9, 7, *prompt[3:]] for prompt in prompts(count, seed=seed, longest=12)]


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", *(pytest.param(x, marks=pytest.mark.wide) for x in ("gemma2", "qwen3_5_text", "gemma4_text"))],
)
def test_rows_of_tokens_beside_other_rows(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    """llama is tied: its head has the rows, too. Gemma scales its embeddings and cuts its logits."""
    family = family_of(name)
    runner = make_runner(family.loaded, num_blocks=300)
    driver = Driver(runner)
    streams: list[tuple[Stream, Reference, str | None]] = []
    for seed, kind in enumerate(TOKENS if name == "qwen2" else ["tokens"]):
        folder = save_trained(family.folder, tmp_path / kind, seed, TOKENS[kind])
        uid, oracle = put_adapter(runner, family.loaded, folder), reference(family.folder, folder)
        streams += [(Stream(prompt, uid), oracle, "own") for prompt in with_tokens(2, seed)]
    plain = put_adapter(runner, family.loaded, family.adapters["all-linear"])
    streams += [(Stream(prompt, plain), family.reference, "all-linear") for prompt in with_tokens(1, 8)]
    streams += [(Stream(prompt), family.reference, None) for prompt in with_tokens(2, 9)]
    for token in (IDS[-1], 7):
        logits = driver.logits([stream for stream, _, _ in streams])
        for row, (stream, oracle, adapter) in zip(logits, streams, strict=True):
            torch.testing.assert_close(row, oracle.logits(stream.tokens, adapter)[-1], atol=TOLERANCE, rtol=0)
        for stream, _, _ in streams:
            stream.output.append(token)


def test_another_process_hears_of_them(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("qwen2")
    folder = save_trained(family.folder, tmp_path / "apart", 0, TOKENS["apart"])
    adapter = read_adapter(folder, family.loaded.adapter_base(), LIMITS)
    assert [(each.ids, each.embeds, each.heads) for each in adapter.extras.tokens] == [
        ((7, 5), True, False), (tuple(IDS), False, True)
    ]  # fmt: skip
    told = json.loads(json.dumps(told_extras(adapter.extras)))
    assert heard_extras(told, adapter.layout, family.loaded.adapter_base().sites) == adapter.extras


ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(("tensors", "config", "problem"), [
    ({}, {"trainable_token_indices": [5, 9, 131]}, "has token 131, but the base model's vocabulary ends at 130"),
    ({}, {"trainable_token_indices": [5, 9, 9]}, "must be a list of 256 token ids at most, each once"),
    ({}, {"trainable_token_indices": list(range(257))}, "must be a list of 256 token ids at most, each once"),
    ({}, {"trainable_token_indices": {"q_proj": IDS}}, "neither the embeddings nor the output head"),
    ({}, {"trainable_token_indices": None}, "there are no rows, or not of those that there are"),
    ({}, {"trainable_token_indices": [5]}, "has shape [3, 64], but [1, 64] fits"),
    ({ROWS: torch.full((3, 64), torch.inf)}, {}, "holds NaN or infinite values"),
    ({}, {"modules_to_save": ["lm_head"]}, "lm_head: modules trained as a whole are not served. A head"),
])  # fmt: skip
def test_what_is_refused(
    family_of: FamilyOf, tmp_path: Path, tensors: dict[str, torch.Tensor | None], config: dict[str, Any], problem: str
) -> None:
    family = family_of("llama")
    folder = changed(save_trained(family.folder, tmp_path / "tokens", 0, TOKENS["tokens"]), tensors, **config)
    with pytest.raises(AdapterInvalid) as refused:
        read_adapter(folder, family.loaded.adapter_base(), LIMITS)
    assert any(problem in f"{v.field}: {v.description}" for v in refused.value.violations), refused.value.violations


def test_where_they_are_not_served_it_is_said(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    folder = save_trained(family.folder, tmp_path / "tokens", 0, TOKENS["tokens"])
    on_gpu = replace(family.loaded, device=torch.device("cuda"))
    for base, problem in (
        (family.loaded.adapter_base(is_read=False), "is not served of a model that runs"),
        (on_gpu.adapter_base(), "is served on the CPU alone"),
    ):
        with pytest.raises(AdapterInvalid, match=f"trainable_token_indices: {problem}"):
            read_adapter(folder, base, LIMITS)
