"""What a plan takes one rank of several to have against what a worker's loader leaves it, and what both refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manylora.capacity.planning import parts
from manylora.capacity.planning.shapes import CannotPlan
from manylora_worker.models import loader
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import LoadedModel, load_model, model_config
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.models.ranks.cuts import SHARED_FAMILIES, check_cuts
from manylora_worker.models.ranks.group import RankGroup

from tests.capacity.test_parts import DENSE, HYBRIDS, MIXTURES, NEW, adapter_bytes, has_kernels, shape
from tests.numerics.families import make_model
from tests.numerics.quantizing import ship

SHARED = (
    *NEW,
    *DENSE,
    "qwen3_moe",
    "mixtral_wide",
    "qwen2_moe_wide",
    "gpt_oss_blocks",
    "glm4_moe",
    "dots1",
    "qwen3_5_wide",
    "qwen3_5_moe_wide",
    "qwen3_next_wide",
    "gemma4_text",
    "gemma4_shared",
    "granite4_h_wide",
    "granite4_h_moe_wide",
)


class _Alone(RankGroup):
    """A rank whose sums are its own alone: what it holds is what it would."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def largest(self, x: torch.Tensor) -> None:
        pass

    def gather_columns(self, part: torch.Tensor, gathered: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the CPU's own layout of a head is a copy."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)


def ranks_of(folder: Path, size: int, quantization: str = "none") -> list[LoadedModel]:
    return [
        load_model(str(folder), dtype=torch.bfloat16, quantization=quantization, group=_Alone(rank, size))  # type: ignore[arg-type]
        for rank in range(size)
    ]


def held_bytes(loaded: LoadedModel) -> int:
    """Memory once where two see it: a tied head is a part of the embeddings."""
    kept = [each for each in loaded.model.modules() if isinstance(each, QuantizedLinear | QuantizedStack)]
    biases = [each.bias for each in kept if getattr(each, "bias", None) is not None]
    tensors = [*loaded.model.parameters(), *biases]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(memory.values()) + sum(each.weight_bytes for each in kept)


def check(folder: Path, size: int, quantization: str = "none") -> None:
    """The memory is that of the rank with the most: it says how many blocks all have."""
    found, ranks = shape(folder, quantization, size), ranks_of(folder, size, quantization)
    assert found.weight_bytes == max(map(held_bytes, ranks))
    for loaded in ranks:
        assert has_kernels(loaded)
        kv = loaded.spec.kv
        assert found.kv_token_bytes == kv.token_bytes(torch.bfloat16)
        assert found.state_bytes == (0 if kv.state is None else kv.state.size_bytes)
        assert found.state_tokens == 16 * kv.state_blocks(16, torch.bfloat16)
        assert found.rank_bytes == adapter_bytes(loaded)


@pytest.mark.parametrize("family", SHARED)
def test_a_rank_has_the_memory_that_a_worker_leaves_it(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    check(tmp_path, 2)


@pytest.mark.parametrize(
    ("family", "size"), [("qwen3_5_moe_wide", 2), ("qwen3_next_wide", 2), ("qwen2", 2), ("granite4_h_wide", 2)]
)
def test_a_rank_has_its_share_of_codes(family: str, size: int, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    check(tmp_path, size, "fp8")


@pytest.mark.parametrize(("name", "quantization"), [("fp8", "fp8"), ("fp8-channel", "fp8"), ("awq-16", "none")])
def test_a_rank_has_its_share_of_what_is_shipped(name: str, quantization: str, tmp_path: Path) -> None:
    make_model("qwen3_moe_wide", tmp_path / "plain")
    ship(tmp_path / "plain", tmp_path / "shipped", name)
    check(tmp_path / "shipped", 2, quantization)


def test_codes_that_ranks_would_tear_are_refused_by_both(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "plain")
    ship(tmp_path / "plain", tmp_path / "shipped", "fp8")
    with pytest.raises(ModelRefused, match="48 of its 96 inputs a rank are no whole groups of 32"):
        ranks_of(tmp_path / "shipped", 2, "fp8")
    with pytest.raises(
        CannotPlan, match=r"--tensor-parallel 2: .*48 of its 96 inputs a rank are no whole groups of 32"
    ):
        shape(tmp_path / "shipped", "fp8", 2)


def refusal(call: Callable[[], object]) -> str:
    """Empty: there is none."""
    try:
        call()
    except (ModelRefused, CannotPlan) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", [*SHARED, *MIXTURES, *HYBRIDS, "gemma4_wide"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_a_worker_refuses_to_share_is_refused(family: str, size: int, tmp_path: Path) -> None:
    """By the same reason. Delta nets that kernels do not compute are served, slowly, and not planned for."""
    make_model(family, tmp_path)
    by_worker = refusal(lambda: check_cuts(model_config(str(tmp_path), "none", "cpu"), size, SHARED_FAMILIES))
    by_plan = refusal(lambda: shape(tmp_path, "none", size))
    if by_worker:
        said, _, counts = by_worker.split(" (")[0].partition(" does not divide ")
        assert said in by_plan
        assert all(count in by_plan for count in counts.split(" and "))
    else:
        assert bool(by_plan) != all(map(has_kernels, ranks_of(tmp_path, size)))
        assert not by_plan or "runs without our kernels there" in by_plan


def test_all_families_that_are_planned_for_are_shared() -> None:
    flat = {"qwen2_vl", "qwen2_5_vl"}  # as older folders name their text parts
    assert parts._FAMILIES.keys() - SHARED_FAMILIES == flat
