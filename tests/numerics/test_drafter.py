"""A draft model beside the served one: answers are those without, greedy and sampled, of the base and of adapters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.parts import EngineParts
from manylora_worker.planning.step_planner import PlannerLimits
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.numerics.conftest import KV_IN_FP8, FamilyOf
from tests.numerics.test_guesses import Answers, requests

DRAFTING = TenantShare(drafting=frozenset(QosClass))


def with_words(folder: Path, source: Path) -> Path:
    """The model with a tokenizer, of which only its tokens are looked at."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def cut(source: Path, folder: Path) -> Path:
    """The model's first layer, on a quarter of its KV's width."""
    model = AutoModelForCausalLM.from_pretrained(source)
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    small = LlamaForCausalLM(config)
    small.load_state_dict(model.state_dict(), strict=False)
    small.save_pretrained(folder)
    return folder


def settings_of(model: Path, draft: Path, store: Path, device: str = "cpu", **more: object) -> WorkerConfig:
    settings = WorkerConfig(
        model=str(model), draft_model=str(draft), threads=1, adapter_store=store, device=device, dtype="float32",
        num_blocks=200, host_kv_mb=0, device_adapter_mb=1, sequence_slots=16, max_batch_tokens=48,
    )  # fmt: skip
    return dataclasses.replace(settings, **more)  # type: ignore[arg-type]


def answers(
    parts: EngineParts, asked: list[EngineRequest], share: TenantShare, *, at_once: int = 2, slots: int = 16
) -> tuple[Answers, EngineCore]:
    limits = EngineLimits(PlannerLimits(48, 17, slots), AdapterCacheLimits(1 << 30, 1 << 20), max_requests=100)
    prefix = PrefixOptions(PrefixKeys(bytes(32), "digest"), 0.25)
    core = EngineCore(parts.runner, parts.backend, limits, prefix, clears_freed=True)
    core.set_share(TenantId("t"), share)
    got: Answers = {}
    for start in range(0, len(asked), at_once):
        for request in asked[start : start + at_once]:
            core.add(request, 0.0)
        while core.has_work():
            for output in core.step(0.0):
                got.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
            core.take_ended()
            core.check_invariants()
    assert core.stats().failed_steps == 0, core.step_error
    return got, core


@pytest.mark.parametrize(
    ("name", "device"),
    [("llama", "cpu"), ("llama" + KV_IN_FP8, "cpu"), pytest.param("llama", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("draft", ["same", "cut"])
def test_answers_are_those_without(
    family_of: FamilyOf, device: str, name: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing pauses, so that there are guesses, wrong ones too, in every answer.
    monkeypatch.setattr("manylora_worker.kinds.guessing._FIRST_PRICE", 0.0)
    family = family_of(name)
    more = {"debug_fill_freed": True, "host_kv_mb": 1, "kv_cache_dtype": family.kv_cache_dtype}
    uids = {None: None, **family.put_adapters(tmp_path / "objects")}
    model = with_words(tmp_path / family.folder.name, family.folder)
    small = model if draft == "same" else with_words(tmp_path / "small", cut(family.folder, tmp_path / "cut"))

    def of_its_own(asked: list[EngineRequest], share: TenantShare) -> tuple[Answers, EngineCore]:
        # A device keeps the adapters of an engine that was there before.
        parts = build_engine(settings_of(model, small, tmp_path, device, **more))
        try:
            return answers(parts, asked, share)
        finally:
            parts.backend.close()

    asked = requests(family, uids)
    plain, without = of_its_own(asked, TenantShare())
    assert without.stats().guessed_tokens == 0
    found, core = of_its_own(asked, DRAFTING)
    assert found == plain
    stats = core.stats()
    assert stats.guessed_tokens > 20
    if draft == "same" and device == "cpu":
        base = [each for each in asked if each.adapter_uid is None and each.sampling.is_greedy]
        _, alone = of_its_own(base, DRAFTING)
        assert alone.stats().right_guesses == alone.stats().guessed_tokens > 20, "it does not see what it guesses from"
    for request in asked:
        if request.sampling.is_greedy:
            adapter = next(name for name, uid in uids.items() if uid == request.adapter_uid)
            expected = family.reference.greedy(list(request.prompt_token_ids), adapter, request.max_tokens)
            assert found[request.request_id, 0] == expected


def test_swapped_evicted_and_found_ones_go_on_as_without(
    family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora_worker.kinds.guessing._FIRST_PRICE", 0.0)
    family = family_of("llama")
    model = with_words(tmp_path / family.folder.name, family.folder)
    prompts = [tuple(3 + (7 * i + k) % 50 for k in range(40)) for i in (0, 1, 2, 0, 1, 2)]
    asked = [
        EngineRequest(RequestId(f"r{i}"), TenantId("t"), QosClass.STANDARD, None, prompt, 40, Sampling(seed=i))
        for i, prompt in enumerate(prompts)
    ]
    plain: Answers | None = None
    evictions = 0
    for share in (TenantShare(), DRAFTING):
        for host_kv_mb in (0.0, 1.0):
            settings = settings_of(model, model, tmp_path, num_blocks=14, host_kv_mb=host_kv_mb)
            parts = build_engine(settings)
            try:
                got, core = answers(parts, asked, share, at_once=3, slots=8)
            finally:
                parts.backend.close()
            plain = got if plain is None else plain
            assert got == plain
            stats = core.stats()
            evictions += stats.evictions + stats.swaps_in
            assert (stats.guessed_tokens > 20) == (share is DRAFTING)
    assert evictions, "nobody had to make room"
