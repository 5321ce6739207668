"""What is served is what transformers computes, found at load: the families pass, models that differ are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.eager_check import check_against_eager
from torch import nn

from tests.numerics.conftest import FamilyOf
from tests.numerics.families import FAMILIES
from tests.numerics.published import PUBLISHED
from tests.numerics.test_checkpoint import published


def check(loaded: LoadedModel) -> None:
    check_against_eager(loaded, LoraPlanner(LoraCosts(2e5, copied_weight=0.0), max_stacked_weights=1 << 24))


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_5_text", "gemma4_text"])
def test_families_pass_and_stay_as_they_were(family_of: FamilyOf, name: str) -> None:
    loaded = family_of(name).loaded
    windows = [getattr(module, "sliding_window", None) for module in loaded.model.modules()]
    check(loaded)
    assert [getattr(module, "sliding_window", None) for module in loaded.model.modules()] == windows
    assert loaded.model.config.get_text_config()._attn_implementation == "manylora_paged"
    check(load_model(str(family_of(name).folder), dtype=torch.bfloat16))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_pass(tmp_path: Path, name: str) -> None:
    published(name, tmp_path / name)
    check(load_model(str(tmp_path / name)))


def hide_windows(loaded: LoadedModel) -> None:
    """As in families whose windows live in the mask alone."""
    for module in loaded.model.modules():
        if isinstance(getattr(module, "sliding_window", None), int):
            module.sliding_window = None  # type: ignore[assignment]


def shift_positions(loaded: LoadedModel) -> None:
    """As in families whose first position is not 0: only where nobody names positions."""
    body: Any = loaded.model.get_decoder()
    forward = body.layers[0].self_attn.forward

    def shifted(*arguments: Any, **options: Any) -> Any:
        cos, sin = options["position_embeddings"]
        if body.config._attn_implementation == "eager":
            options["position_embeddings"] = (cos.roll(2, 1), sin.roll(2, 1))
        return forward(*arguments, **options)

    body.layers[0].self_attn.forward = shifted


def couple_rows(loaded: LoadedModel) -> None:
    """As quantizations whose scale is of the whole step."""

    def scale(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output / arguments[0].abs().max()

    loaded.model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(scale)


@pytest.mark.parametrize(
    ("family", "change"), [("gemma2", hide_windows), ("llama", shift_positions), ("llama", couple_rows)]
)
def test_what_differs_is_refused(family_of: FamilyOf, family: str, change: Callable[[LoadedModel], None]) -> None:
    loaded = load_model(str(family_of(family).folder))
    change(loaded)
    with pytest.raises(ModelRefused, match="not served as transformers computes it"):
        check(loaded)
