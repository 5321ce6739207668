"""Which modules a PEFT configuration names, with which rank and scale, within a budget of time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from manylora_shared.errors import shown
from manylora_worker.weights.peft.patterns import COMPILE_BUDGET_S
from manylora_worker.weights.peft_config import (
    LoraSettings,
    ModuleMatcher,
    Problems,
    parse_settings,
)
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from tests.frozen_heap import frozen_heap

HUB = "/cache/huggingface/hub"
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
SAME_BASE = [
    None, "", ".", "acme/tiny-llama", "/models/tiny-llama/", "acme/Tiny-Llama", "D:\\models\\tiny-llama",
    f"{HUB}/models--acme--tiny-llama/snapshots/{COMMIT}", f"{HUB}/models--acme--tiny-llama/snapshots/main/",
    f"/copied/snapshots/{COMMIT}", "runs/sft-2/checkpoint-500", "unsloth/tiny-llama-bnb-4bit",
    "unsloth/tiny-llama-unsloth-bnb-4bit", "other/served-as",
]  # fmt: skip
OTHER_BASE = ["acme/tiny", "tiny-llama/other", f"{HUB}/models--tiny-llama--other/snapshots/{COMMIT}", "x-bnb-4bit"]


def base_problems(base: str | None, *aliases: str) -> list[str]:
    problems = Problems()
    config = {"peft_type": "LORA", "r": 1, "target_modules": ["q"], "base_model_name_or_path": base}
    parse_settings(config, base_names=["Served-As", "tiny-llama", *aliases], max_rank=8, problems=problems)
    return [f"{violation.field}: {violation.description}" for violation in problems.violations]


@pytest.mark.parametrize("base", SAME_BASE)
def test_a_trainer_names_the_base_model_in_many_ways(base: str | None) -> None:
    assert base_problems(base) == []


@pytest.mark.parametrize("base", OTHER_BASE)
def test_an_alias_is_a_name_of_the_base_model(base: str) -> None:
    assert base_problems(base, "unheard-of", base) == []
    assert base_problems(f"/other/place/{base.rpartition('/')[2].upper()}", base) == []


@pytest.mark.parametrize("base", OTHER_BASE)
def test_another_base_model_is_refused_with_a_hint(base: str) -> None:
    (problem,) = base_problems(base)
    assert problem == (
        f"base_model_name_or_path: made for {shown(base)}, but 'Served-As' is served; "
        "if they are the same model, set it to null, or give the workers --model-alias"
    )


DEAR: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": "(" * 600 + "a" + ")" * 600}, "groups"),
    ({"target_modules": "(?V1)" + "[" * 600 + "a" + "]" * 600}, "groups"),
    ({"rank_pattern": {"(?:" * 200 + "a" + ")" * 200: 8}}, "groups"),
    ({"target_modules": "(?:(?:a{1000}){1000}){1000}"}, "repeats"),
    ({"target_modules": "a{2,99999}{2}"}, "repeats"),
    ({"exclude_modules": "a{99999999999999999999}"}, "repeats"),
    ({"layers_to_transform": [0], "layers_pattern": ["h", "(?:a{,200}){200}"]}, "repeats"),
    ({"target_modules": "a" * 4097}, "characters"),
    ({"target_modules": [f"x{i}" for i in range(50_000)]}, "more than 4096"),
    ({"exclude_modules": [f"x{i}" for i in range(50_000)]}, "more than 4096"),
    ({"rank_pattern": {f"x{i}": 8 for i in range(50_000)}}, "more than 4096"),
    ({"layers_to_transform": list(range(50_000))}, "4096"),
    ({"rank_pattern": {f"(?if)x{i}" + "straße" * 40: 8 for i in range(1200)}}, "too long to compile"),
    ({"r": ["x" * 300_000]}, "whole number"),
    ({"peft_type": "x" * 300_000}, "LORA"),
    ({"x" * 300_000: 1}, "not supported"),
]


@pytest.mark.parametrize(("fields", "says"), DEAR, ids=[f"{next(iter(f))[:20]}-{says}" for f, says in DEAR])
def test_configurations_that_would_cost_much(fields: dict[str, Any], says: str) -> None:
    problems = Problems()
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]} | fields
    with frozen_heap():
        before_s = time.thread_time()
        parse_settings(config, base_names=["m"], max_rank=64, problems=problems)
        assert time.thread_time() - before_s < COMPILE_BUDGET_S + 0.5
    assert any(says in v.description for v in problems.violations)
    assert all(len(v.field) + len(v.description) < 1000 for v in problems.violations)


def test_as_many_names_as_may_be_are_matched_soon() -> None:
    names = tuple(f"model.layers.{i}.x_proj" for i in range(4096))
    matcher = ModuleMatcher(LoraSettings(1, 1.0, False, {}, {}, names, names, None, ()))
    with frozen_heap():
        before_s = time.thread_time()
        assert not any(matcher.is_targeted(f"model.layers.{i}.self_attn.q_proj", is_linear=True) for i in range(2000))
        assert time.thread_time() - before_s < 0.2


PATHS = [
    f"model.layers.{i}.{m}" for i in range(12) for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
] + ["model.experts.1.layers.3.q_proj", "q_proj", "lm_head"]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"]},
        {"target_modules": r".*\.(1|11)\..*proj"},
        {"target_modules": "q_proj|.*down_proj"},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.1.self_attn.q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "model.layers.5.mlp.down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": ["model|h", "layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": r"(?x) .* \.(q|down)_proj # trained"},
        {"target_modules": ["q_proj"], "exclude_modules": "(?x) .* 1 .* # untouched"},
        {"target_modules": ["q_proj"], "rank_pattern": {"1.self_attn.q_proj": 3, "q_proj": 5}, "use_rslora": True},
        {
            "target_modules": ["q_proj"],
            "rank_pattern": {"^model.layers.1.*": 3},
            "alpha_pattern": {"proj": 3, "q_proj": 7},
        },
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {path: 2 + i % 5 for i, path in enumerate(PATHS)},
            "alpha_pattern": {f"^{path}": 1 + i % 3 for i, path in enumerate(PATHS)},
        },
    ],
)
def test_modules_ranks_and_scales_are_chosen_as_peft_does(fields: dict[str, Any]) -> None:
    config = LoraConfig(r=4, lora_alpha=6, **fields)
    targets, excludes, layers = config.target_modules, config.exclude_modules, config.layers_to_transform
    pattern = config.layers_pattern
    matcher = ModuleMatcher(
        LoraSettings(
            rank=4,
            alpha=6.0,
            use_rslora=config.use_rslora,
            rank_pattern=config.rank_pattern,
            alpha_pattern=config.alpha_pattern,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            exclude_modules=excludes if isinstance(excludes, str) else tuple(excludes or ()),
            layers_to_transform=(layers,) if isinstance(layers, int) else None if layers is None else tuple(layers),
            layers_pattern=(pattern,) if isinstance(pattern, str) else tuple(pattern or ()),
        )
    )
    for path in PATHS:
        found = check_target_module_exists(config, path)
        is_targeted = bool(found) and type(found).__name__ != "_ExcludedModule"
        assert matcher.is_targeted(path, is_linear=True) == is_targeted, path
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), 4)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), path), 6)
        scale = alpha / rank**0.5 if config.use_rslora else alpha / rank
        assert matcher.rank_and_scale(path) == (rank, pytest.approx(scale))
