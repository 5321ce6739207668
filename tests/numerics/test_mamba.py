"""Mamba 2 beside attention (Granite 4's hybrids) against transformers + peft: states go from chunk to chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.build import _planner
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.mamba import find_mambas
from manylora_worker.models.loader import load_model
from manylora_worker.models.ranks.cuts import SHARED_FAMILIES, check_cuts
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import AutoModelForCausalLM

from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import NEVER_STACK, Driver, Stream, make_runner, prompts
from tests.numerics.families import make_model
from tests.numerics.mixtures import OWN_PATTERNS, check_mixed_batch, make_mixture
from tests.numerics.test_checkpoint import PROMPT, logits_of, published
from tests.numerics.test_engine_against_peft import TOLERANCE, check_next_logits

FAMILY = "granite4_h"


def test_mixed_batch_logits(family_of: FamilyOf) -> None:
    check_next_logits(family_of, FAMILY, NEVER_STACK, num_blocks=900)


@OWN_PATTERNS
def test_a_mixture_beside_a_shared_expert(tmp_path: Path) -> None:
    """LoRA on experts and routers, too; prompts in chunks, and arrivals in mid-flight."""
    mixture = make_mixture(tmp_path, "granite4_h_moe")
    assert "model.layers.0.block_sparse_moe.router" in mixture.loaded.spec.modules
    check_mixed_batch(mixture, num_blocks=900)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
def test_chunks_of_a_prompt_equal_transformers(family_of: FamilyOf, chunk_tokens: int) -> None:
    """The longest is more than is computed at once."""
    family = family_of(FAMILY)
    driver = Driver(make_runner(family.loaded))
    prompt = prompts(1, seed=5, shortest=150, longest=150)[0]
    chunked = Stream(prompt)
    while chunked.num_computed < len(prompt):
        logits = driver.logits([chunked], chunk_tokens)
    expected = family.reference.logits(prompt, None)[-1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)


def test_a_state_that_is_lost_is_felt(family_of: FamilyOf) -> None:
    """So the tests above can fail: the second chunk begins with another sequence's state."""
    driver = Driver(make_runner(family_of(FAMILY).loaded, num_blocks=200))
    prompt = prompts(1, seed=5, shortest=33, longest=33)[0]
    right, wrong, other = Stream(prompt), Stream(prompt), Stream(prompt[::-1])
    driver.logits([right, wrong, other], 20)
    wrong.blocks[: driver.runner.state_blocks] = other.blocks[: driver.runner.state_blocks]
    found = driver.logits([right, wrong])
    assert (found[0] - found[1]).abs().max() > 100 * TOLERANCE


def test_our_decoder_and_the_kernels_run_it(family_of: FamilyOf) -> None:
    loaded = family_of(FAMILY).loaded
    assert len(find_mambas(loaded.model)) == 2
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    check_against_eager(loaded, _planner(loaded))
    check_against_eager(load_model(str(family_of(FAMILY).folder), dtype=torch.bfloat16), _planner(loaded))


@pytest.mark.parametrize("name", ["granite-4.0-h-micro", "granite-4.0-h-tiny"])
def test_published_folders_are_served(name: str, tmp_path: Path) -> None:
    reference = published(name, tmp_path / name)
    loaded = load_model(str(tmp_path / name))
    driver = Driver(make_runner(loaded, num_blocks=200))
    stream = Stream(PROMPT)
    driver.logits([stream], 11)
    torch.testing.assert_close(driver.logits([stream])[0], logits_of(reference, PROMPT), atol=1e-4, rtol=0)


def test_ranks_share_whole_heads_and_groups(tmp_path: Path) -> None:
    """One group's B and C are on each rank."""
    config = make_model(FAMILY, tmp_path).config
    assert (config.mamba_n_heads, config.mamba_n_groups) == (8, 2)
    check_cuts(config, 2, SHARED_FAMILIES)
    for heads, groups, odd in ((6, 6, "mamba_n_heads 6 and mamba_n_groups 6"), (8, 2, "mamba_n_groups 2"), (8, 1, "")):
        config.mamba_n_heads, config.mamba_n_groups = heads, groups
        with pytest.raises(ModelRefused, match="--tensor-parallel 4: does not divide") as refused:
            check_cuts(config, 4, SHARED_FAMILIES)
        assert odd in str(refused.value)
        assert ("mamba" in str(refused.value)) == bool(odd)


def test_fp8_of_its_layers(tmp_path: Path) -> None:
    make_model(FAMILY, tmp_path)
    loaded = load_model(str(tmp_path), quantization="fp8")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = Driver(make_runner(loaded, num_blocks=200)).logits([Stream(PROMPT)])[0]
    expected = logits_of(reference, PROMPT)
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.2, "rounded, and near"
