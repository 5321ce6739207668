"""An adapter in the base model's weights and out again: the base comes back bit for bit, rows equal a merge by peft."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, MergeRefused, Sampling
from manylora_worker.models.build import build_engine
from manylora_worker.models.loader import load_model
from manylora_worker.models.merged_weights import MergedWeights
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.weights.source import read_adapter
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.families import VOCAB_SIZE

TOLERANCE = 2e-4
ADAPTERS = ("all-linear", "patterns", "some-layers")


def merge(runner: TorchModelRunner, uid: AdapterUid) -> None:
    while not runner.merge_some(uid):
        pass


def restore(runner: TorchModelRunner) -> None:
    while not runner.restore_some():
        pass


def base_logits(runner: TorchModelRunner) -> torch.Tensor:
    return Driver(runner).logits([Stream(prompt) for prompt in prompts(3, seed=4)])


def by_peft(family: Family, name: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32, attn_implementation="eager")
    merged = PeftModel.from_pretrained(model, family.adapters[name]).merge_and_unload().eval()
    with torch.no_grad():
        return torch.stack([merged(torch.tensor([prompt])).logits[0, -1] for prompt in prompts(3, seed=4)])


@pytest.mark.parametrize(
    ("name", "packs", "dtype"),
    [
        ("llama", False, torch.float32),
        ("llama", True, torch.float32),
        ("llama", True, torch.bfloat16),
        ("qwen2", False, torch.float32),
        ("phi3", False, torch.bfloat16),
    ],
)
def test_merge_and_back(
    family_of: FamilyOf, name: str, packs: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(name)
    monkeypatch.setattr("manylora_worker.models.linears.WORTH_PACKING", 0 if packs else 1 << 40)
    loaded = load_model(str(family.folder), dtype=dtype)
    runner = make_runner(loaded)
    before = base_logits(runner)
    for adapter in [each for each in ADAPTERS if each in family.adapters]:
        uid = put_adapter(runner, loaded, family.adapters[adapter])
        found = []
        for _ in range(2):
            merge(runner, uid)
            found.append(base_logits(runner))
            restore(runner)
            assert torch.equal(base_logits(runner), before)
        assert torch.equal(*found)
        expected = by_peft(family, adapter)
        assert (expected - before).abs().max() > 0.1
        if dtype is torch.float32:
            torch.testing.assert_close(found[0], expected, atol=TOLERANCE, rtol=0)
        else:  # nearer to its own merge by far than to the base model
            assert (found[0] - expected).norm() < 0.4 * (before - expected).norm()


def test_a_merge_that_fails_leaves_the_base_as_it_was(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of("llama")
    loaded = load_model(str(family.folder))
    runner = make_runner(loaded)
    before, uid = base_logits(runner), put_adapter(runner, loaded, family.adapters["all-linear"])
    put = MergedWeights._write
    for whole in (True, False):
        left = [3]

        def fail(self: MergedWeights, *site: object, whole: bool = whole, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] >= 0 or not whole:
                put(self, *site)
            if left[0] < 0:
                raise MemoryError("no room for what is kept")

        with monkeypatch.context() as patch:
            patch.setattr(MergedWeights, "_write", fail)
            with pytest.raises(MemoryError):
                merge(runner, uid)
        restore(runner)
        assert torch.equal(base_logits(runner), before)


def test_what_is_refused(family_of: FamilyOf) -> None:
    family = family_of("llama")
    adapter = read_adapter(family.adapters["all-linear"], family.loaded.adapter_base(), LIMITS).on(torch.device("cpu"))
    head = replace(adapter, sites={len(family.loaded.sites): next(iter(adapter.sites.values()))})
    for quantization in ("fp8", "nf4"):
        quantized = MergedWeights(load_model(str(family.folder), quantization=quantization))
        assert "quantized" in quantized.problem
        with pytest.raises(MergeRefused, match="quantized"):
            quantized.merge_some(lambda: adapter)
    weights = MergedWeights(family.loaded)
    assert weights.problem == ""
    for changed, words in (
        (replace(adapter, rope=object()), "rotates"),
        (replace(adapter, columns={0: ()}), "DoRA"),
        (replace(adapter, experts=adapter.sites), "experts"),
        (head, "output head"),
    ):
        with pytest.raises(MergeRefused, match=words):
            weights.merge_some(lambda changed=changed: changed)
        assert weights.restore_some()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_a_whole_engine_merges_and_comes_back(family_of: FamilyOf, tmp_path: Path, device: str, dtype: str) -> None:
    """With graphs, on a GPU: merged answers are peft's, and the base's before and after are the same bit for bit."""
    family = family_of("llama")
    uids = family.put_adapters(tmp_path / "objects")
    settings = WorkerConfig(
        model=str(family.folder), threads=1, adapter_store=tmp_path, device=device, dtype=dtype, num_blocks=64,
        host_kv_mb=0, device_adapter_mb=2, sequence_slots=8, max_batch_tokens=48,
    )  # fmt: skip
    parts = build_engine(settings)
    limits = EngineLimits(
        planner=PlannerLimits(max_batch_tokens=48, prefill_chunk_tokens=17, sequence_slots=8),
        adapters=AdapterCacheLimits(host_bytes=1 << 30, device_bytes=1 << 21),
        max_requests=100,
    )
    core, tenant = EngineCore(parts.runner, parts.backend, limits), TenantId("t")
    rng = random.Random(3)
    wanted = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (1, 4, 9, 30)]

    def answers(adapter: str | None) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Greedy, and the log-probabilities of what is drawn."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for i, prompt in enumerate(wanted):
            uid, sampling = uids[adapter] if adapter else None, Sampling(seed=i, temperature=0.0, top_logprobs=0)
            core.add(EngineRequest(RequestId(f"r{i}"), tenant, QosClass.STANDARD, uid, prompt, 12, sampling), now=0.0)
            while core.has_work():  # one by one: beside others a row's sums may be of another order
                for output in core.step(now=0.0):
                    tokens, scores = found.setdefault(output.request_id, ([], []))
                    tokens.extend(output.token_ids)
                    scores.extend(each.logprob for each in output.logprobs)
                core.check_invariants()
        assert core.stats().failed_steps == 0
        core.take_ended()
        return [(tuple(tokens), tuple(scores)) for _, (tokens, scores) in sorted(found.items())]

    def set_merged(adapter: str | None) -> None:
        told: list[str] = []
        core.set_merged(uids[adapter] if adapter else None, tenant, told.append, 0.0)
        while core.has_work():
            core.step(now=0.0)
            core.check_invariants()
        assert told == [""]

    try:
        base = answers(None)
        set_merged("all-linear")
        merged = answers("all-linear")
        set_merged("patterns")
        other = answers("patterns")
        set_merged(None)
        assert answers(None) == base
        set_merged("all-linear")
        assert answers("all-linear") == merged
        for adapter, found in (("all-linear", merged), ("patterns", other)):
            expected = [tuple(family.reference.greedy(list(prompt), adapter, 12)) for prompt in wanted]
            assert dtype == "bfloat16" or [tokens for tokens, _ in found] == expected
        set_merged(None)
        rows = answers("all-linear")
        assert dtype == "bfloat16" or [tokens for tokens, _ in rows] == [tokens for tokens, _ in merged]
    finally:
        parts.backend.close()
