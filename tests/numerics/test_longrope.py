"""Phi's longrope beyond the original context: long factors at every length, as transformers computes a sequence that is
longer than that in one pass; by our decoder, by the model as transformers wrote it, with adapters, through the engine.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.checkpoint import LONG_FACTORS, ModelRefused, take_long_factors
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.model_runner import TorchModelRunner
from transformers import Phi3Config, PreTrainedModel

from tests.numerics.adapters import Reference, recipes, save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.test_checkpoint import published
from tests.numerics.test_drafter import answers, settings_of

ORIGINAL, FULL = 128, 256
NAMES = ["phi-3.5-mini", "phi-4-mini"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    made: PreTrainedModel = published(request.param, folder)
    adapter = save_adapter(made, folder.parent / "adapter", 3, **recipes("phi3")["all-linear"])
    return folder, Reference(made, {"own": adapter})


def long_logits(reference: Reference, tokens: list[int], adapter: str | None = None) -> torch.Tensor:
    """At each of the tokens, in one pass over a sequence that is longer than the original context."""
    return reference.logits([*tokens, *[5] * max(0, ORIGINAL + 1 - len(tokens))], adapter)[: len(tokens)]


def as_transformers_wrote_it(loaded: LoadedModel) -> TorchModelRunner:
    cache = KvCache(loaded.spec.kv, num_blocks=400, block_size=4, dtype=loaded.dtype, device=loaded.device)
    planner = LoraPlanner(LoraCosts(2e5, copied_weight=0.0), max_stacked_weights=1 << 24)
    return TorchModelRunner(loaded, None, cache, planner)


@pytest.mark.parametrize("is_read", [True, False], ids=["ours", "transformers"])
def test_logits_at_every_length(model: tuple[Path, Reference], is_read: bool) -> None:
    """Short and long sequences beside each other, in chunks that cross the original context's end."""
    folder, reference = model
    loaded = load_model(str(folder), max_model_len=FULL)
    assert loaded.spec.max_context_tokens == FULL
    runner = make_runner(loaded, num_blocks=400) if is_read else as_transformers_wrote_it(loaded)
    uid = put_adapter(runner, loaded, folder.parent / "adapter")
    whole = prompts(1, seed=1, shortest=220, longest=220)[0]
    lengths = (5, 60, ORIGINAL, ORIGINAL + 1, 220)
    for adapter in (None, "own"):
        expected = long_logits(reference, whole, adapter)
        driver = Driver(runner)
        streams = [Stream(whole[:length], uid if adapter else None) for length in lengths]
        for stream in streams:
            while len(stream.prompt) - stream.num_computed > 50:
                driver.logits([stream], 50)
        found = driver.logits(streams)
        for length, row in zip(lengths, found, strict=True):
            torch.testing.assert_close(row, expected[length - 1], atol=TOLERANCE, rtol=0)


def test_greedy_answers_across_the_border(model: tuple[Path, Reference]) -> None:
    folder, reference = model
    loaded = load_model(str(folder), max_model_len=FULL)
    driver = Driver(make_runner(loaded, num_blocks=400))
    uid = put_adapter(driver.runner, loaded, folder.parent / "adapter")
    for adapter, length in ((None, 110), ("own", 110), (None, 150)):
        stream = Stream(prompts(1, seed=length, shortest=length, longest=length)[0], uid if adapter else None)
        driver.run([stream], 40, prefill_tokens=64)
        tokens = list(stream.prompt)
        for _ in range(40):
            tokens.append(int(long_logits(reference, tokens, adapter)[-1].argmax()))
        assert stream.output == tokens[length:]


@pytest.mark.parametrize("most", [0, 100, ORIGINAL])
def test_up_to_the_original_context_the_factors_are_the_short_ones(model: tuple[Path, Reference], most: int) -> None:
    folder, reference = model
    loaded = load_model(str(folder), max_model_len=most)
    assert loaded.spec.max_context_tokens == (most or ORIGINAL)
    assert loaded.spec.rotation == ""
    prompt = prompts(1, seed=2, shortest=90, longest=90)[0]
    found = Driver(make_runner(loaded)).logits([Stream(prompt)])[0]
    short = reference.logits(prompt, None)[-1]
    torch.testing.assert_close(found, short, atol=TOLERANCE, rtol=0)
    assert (long_logits(reference, prompt)[-1] - short).abs().max() > 100 * TOLERANCE, "the oracle does not feel it"


def test_it_is_told(model: tuple[Path, Reference], caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = model
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(folder), max_model_len=200)
    assert loaded.spec.rotation == LONG_FACTORS
    assert f"{LONG_FACTORS}, for sequences of any length: the context has 200 tokens" in caplog.text
    assert load_model(str(folder), max_model_len=10 * FULL).spec.max_context_tokens == FULL
    caplog.clear()
    load_model(str(folder))
    assert "--max-model-len above it, up to 256, takes the long factors" in caplog.text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_through_the_engine(model: tuple[Path, Reference], device: str, tmp_path: Path) -> None:
    folder, reference = model
    settings = settings_of(folder, folder, tmp_path, device, draft_model="", max_model_len=FULL)
    asked = [
        EngineRequest(
            RequestId(f"{length}"), TenantId("t"), QosClass.STANDARD, None,
            tuple(prompts(1, seed=length, shortest=length, longest=length)[0]), 24, Sampling(temperature=0.0),
        )
        for length in (9, 115, 190)
    ]  # fmt: skip
    parts = build_engine(settings)
    try:
        assert parts.model.rotation == LONG_FACTORS
        got, _ = answers(parts, asked, TenantShare(), at_once=3)
    finally:
        parts.backend.close()
    for request in asked:
        tokens = list(request.prompt_token_ids)
        for _ in range(24):
            tokens.append(int(long_logits(reference, tokens)[-1].argmax()))
        assert got[request.request_id, 0] == tokens[len(request.prompt_token_ids) :]


def test_lengths_that_are_none_are_refused() -> None:
    config = Phi3Config()
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    config.rope_parameters = {"rope_type": "longrope", **factors, "original_max_position_embeddings": "many"}
    with pytest.raises(ModelRefused, match="how long a context may be"):
        take_long_factors(config, FULL)
