"""Layers that differ in their heads and read one another's keys and values (Gemma 4), against transformers + peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.build import _planner, _shape
from manylora_worker.models.experts import find_experts
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.source import read_adapter
from peft import PeftModel

from tests.numerics.adapters import save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS, NEVER_STACK, Driver, Stream, make_runner, mixed_streams, prompts, put_adapter
from tests.numerics.mixtures import OWN_PATTERNS, check_mixed_batch, make_mixture
from tests.numerics.test_checkpoint import PROMPT, logits_of, published
from tests.numerics.test_engine_against_peft import TOLERANCE
from tests.numerics.test_engine_against_peft import check_next_logits as check_family

TEXT = ("q_proj", "k_proj", "per_layer_model_projection", "per_layer_input_gate")
SHAPES = [pytest.param("gemma4_text"), pytest.param("gemma4_wide", marks=pytest.mark.wide)]


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_batch_logits(family_of: FamilyOf, name: str) -> None:
    check_family(family_of, name, NEVER_STACK)


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_of_chunks_beside_others(family_of: FamilyOf, name: str) -> None:
    family = family_of(name)
    driver = Driver(make_runner(family.loaded, num_blocks=300), seed=1)
    mixed = mixed_streams(family, driver, seed=1)
    streams = [stream for stream, _ in mixed]
    for arrived in range(1, len(streams) + 1):
        driver.step([s for s in streams[:arrived] if len(s.output) < 6], 5)
    driver.run(streams, 6, prefill_tokens=5)
    for stream, adapter in mixed:
        assert stream.output == family.reference.greedy(stream.prompt, adapter, 6)


def test_a_prompt_in_chunks_is_what_it_is_at_once(family_of: FamilyOf) -> None:
    family = family_of("gemma4_text")
    driver = Driver(make_runner(family.loaded))
    prompt = prompts(1, seed=5, shortest=33, longest=33)[0]
    whole = driver.logits([Stream(prompt)])
    for chunk_tokens in (1, 7):
        chunked = Stream(prompt)
        while chunked.num_computed < len(prompt):
            logits = driver.logits([chunked], chunk_tokens)
        torch.testing.assert_close(logits, whole, atol=TOLERANCE, rtol=0)


def test_what_is_loaded(family_of: FamilyOf) -> None:
    """Three layers of six keep keys and values: two of 2 * 16 and one of 2 * 24 elements."""
    loaded, wide = (family_of(name).loaded for name in ("gemma4_text", "gemma4_wide"))
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    assert [each.kv_of for each in weights.attentions] == [0, 1, 2, 1, 1, 2]
    products = [[slot.path[-6:] for slot in site.slots] for site in wide.sites if site.slots[0].path.endswith("q_proj")]
    assert products == [["q_proj", "k_proj", "v_proj"], *[["q_proj", "k_proj"]] * 2]
    assert loaded.spec.kv.token_bytes(torch.float32) == 2 * 4 * (2 * 32 + 48)
    assert [place.is_own for place in loaded.spec.kv.places] == [True] * 3 + [False] * 3
    assert "model.layers.5.self_attn.k_proj" not in loaded.spec.modules
    assert {slot.path for site in loaded.sites for slot in site.slots} == set(loaded.spec.modules)
    assert _shape(loaded).attention == 4 * 4 * 2 * (16 + 16 + 24)


@OWN_PATTERNS
def test_beside_experts(tmp_path: Path) -> None:
    """The router is none of the known ones; adapters are on its layer, attention, the dense MLP and stacks."""
    mixture = make_mixture(tmp_path, "gemma4_moe")
    check_mixed_batch(mixture)
    modules = mixture.loaded.spec.modules
    assert {"model.layers.0.router.proj", "model.layers.0.experts.7.down_proj"} <= modules.keys()
    assert [each.router_name for each in find_experts(mixture.references[None]._wrapped)] == [""] * 3
    narrow = load_model(str(mixture.folder), dtype=torch.bfloat16)
    assert narrow.spec.experts.keys() == mixture.loaded.spec.experts.keys(), "shares come in 32 bits there"
    check_against_eager(narrow, _planner(narrow))
    for loaded in (mixture.loaded, narrow):
        weights = trusted_weights(loaded)
        assert weights is not None
        assert weights.has_kernels


def test_the_text_part_of_a_model_of_text_images_and_sound(tmp_path: Path) -> None:
    """Also by an adapter of all of it: what it has for the other parts is named, and not computed."""
    reference = published("gemma-4-e2b", tmp_path / "gemma")
    targets = rf".*(language_model.*({'|'.join(TEXT)})|embed_vision\.embedding_projection)"
    folder = save_adapter(reference, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules=targets)
    loaded = load_model(str(tmp_path / "gemma"))
    assert not any("tower" in name for name, _ in loaded.model.named_modules())
    driver = Driver(make_runner(loaded))
    uid = put_adapter(driver.runner, loaded, folder)
    plain, adapted = driver.logits([Stream(PROMPT), Stream(PROMPT, uid)])
    torch.testing.assert_close(plain, logits_of(reference, PROMPT), atol=TOLERANCE, rtol=0)
    wrapped = PeftModel.from_pretrained(reference, folder).eval()
    torch.testing.assert_close(adapted, logits_of(wrapped, PROMPT), atol=TOLERANCE, rtol=0)
    assert not torch.allclose(plain, adapted, atol=1e-2)
    base = loaded.adapter_base()
    adapter = read_adapter(folder, base, LIMITS)
    coverage = coverage_of(folder, adapter.layout, base, adapter.extras)
    assert coverage.num_left_out > 0
    assert all("embed_" in name or "tower" in name for name in coverage.left_out)
