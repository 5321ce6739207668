"""A draft model on a device's runner: on its share of the blocks, its guesses are those of the CPU's runner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manylora_worker.kinds.api import Draft, DraftModel, ModelRunner, Sampling, SequenceChunk, StepBatch
from manylora_worker.models import loader
from manylora_worker.models.drafts.drafter import Drafter
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.model_runner import TorchModelRunner

from tests.numerics.conftest import KV_IN_FP8, FamilyOf

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner
from manylora_worker.models.decoder.read import read_decoder

from tests.numerics.interpreter import DEVICES, needs_interpreter

pytestmark = pytest.mark.kernels

LIMITS = DeviceLimits(max_rows=32, max_sequences=4, adapter_slots=1, max_rank=16)
PROMPT, NUM_GUESSES = (5, 9, 7, 11, 4), 3


def guesses(loaded: loader.LoadedModel, *, compiled: bool) -> list[int]:
    """The tokens of a chunk of the prompt's last token, by the model as its own draft model, twice."""
    kv = replace(loaded.spec.kv, beside=loaded.spec.kv)
    cache = KvCache(kv, num_blocks=8, block_size=4, dtype=loaded.dtype, device=loaded.device)
    runner: ModelRunner
    if compiled:
        weights = read_decoder(loaded)
        assert weights is not None
        runner = DeviceModelRunner(loaded, weights, cache.beside(), LIMITS, num_kv_blocks=8)
    else:
        planner = LoraPlanner(LoraCosts(product=2e5, copied_weight=40.0), max_stacked_weights=1)
        runner = TorchModelRunner(loaded, trusted_weights(loaded), cache.beside(), planner)
    drafter = Drafter(runner, DraftModel(1.0, 100), loaded.spec.vocab_size)
    start, found, end = 0, list[int](), len(PROMPT)
    tokens = PROMPT
    for _ in range(2):
        chunk = SequenceChunk(
            sequence_id=1, token_ids=tokens[-1:], start_position=end - 1, block_table=[6, 2, 4, 1], adapter_uid=None,
            samples=True, sampling=Sampling(), choice=0, output_index=0, prompt_token_ids=PROMPT, output_token_ids=[],
            num_guesses=NUM_GUESSES, draft=Draft(start, tokens[start:], NUM_GUESSES),
        )  # fmt: skip
        (guessed,) = drafter.guessed(StepBatch([chunk])).chunks
        found += guessed.token_ids[1:]
        # all but the last guess is seen already
        tokens = (*tokens, *guessed.token_ids[1:])
        start, end = len(tokens) - 1, len(tokens)
    assert (cache.by_block.view(8, 2, -1)[:, 0] == 0).all(), "the model's own keys and values are touched"
    return found


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=[needs_interpreter, pytest.mark.slow]), DEVICES[1]])
@pytest.mark.parametrize("name", ["llama", "llama" + KV_IN_FP8])
def test_guesses_are_those_of_the_reference(
    family_of: FamilyOf, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of(name)

    def loaded(device: str) -> loader.LoadedModel:
        found = loader.load_model(str(family.folder), device=device)
        kv = replace(found.spec.kv, scales=family.loaded.spec.kv.scales)
        return replace(found, spec=replace(found.spec, kv=kv))

    expected = guesses(loaded("cpu"), compiled=False)
    assert guesses(loaded(device), compiled=True) == expected
    assert expected == family.reference.greedy(list(PROMPT), None, 2 * NUM_GUESSES)
