"""Keys and values in FP8 on the CPU: scales, and answers against transformers with a cache that rounds the same way."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manylora_worker.config import WorkerConfig
from manylora_worker.models.build import _check_block, build_engine
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.fp8_codes import FP8_LARGEST
from manylora_worker.models.layers.kv_cache import MIB, KvGeometry
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.kv_scales import with_fp8_kv
from manylora_worker.models.torch.model_runner import TorchModelRunner
from transformers import AutoModelForCausalLM

from bench.quality import KV_FP8, perplexity
from tests.numerics.conftest import KV_IN_FP8, FamilyOf, reference_of
from tests.numerics.driver import Driver, Stream, make_runner, mixed_streams, prompts
from tests.numerics.families import EACH_FAMILY

LARGE = 900.0  # of some keys of Qwen2's: beyond what a code without a scale holds


def settings_of(model: Path, store: Path, **more: Any) -> WorkerConfig:
    settings = WorkerConfig(model=str(model), threads=1, adapter_store=str(store), device="cpu", kv_cache_mb=1)
    return dataclasses.replace(settings, kv_cache_dtype="fp8", **more)


def kept(runner: TorchModelRunner, stream: Stream) -> torch.Tensor:
    """The codes of its tokens, of all layers, keys and values: [tokens, ...]."""
    cache = runner._cache
    codes = cache.by_block[stream.blocks].view(len(stream.blocks), -1, cache.block_size, cache.geometry.row_elements)
    return codes.transpose(1, 2).flatten(0, 1)[: stream.num_computed]


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """All codes but those of numbers that lie between two, which another order of summing moves to a neighbour."""
    differing = (found.int() - expected.int()).abs()
    assert differing.max() <= 1
    assert differing.count_nonzero() <= 1e-3 * differing.numel()


@pytest.mark.parametrize("name", [*EACH_FAMILY, pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_answers_are_those_of_a_cache_that_rounds(family_of: FamilyOf, name: str) -> None:
    """In chunks, beside one another, each with its adapter; and rounding is felt, so this can fail."""
    family, plain = family_of(name + KV_IN_FP8), family_of(name)
    driver = Driver(make_runner(family.loaded, num_blocks=400), seed=1)
    mixed = mixed_streams(family, driver, seed=1)
    streams = [stream for stream, _ in mixed]
    rounded, felt = [], []
    for (stream, adapter), row in zip(mixed, driver.logits(streams), strict=True):
        expected = family.reference.logits(stream.tokens, adapter)[-1]
        rounded.append(float((row - expected).norm()))
        felt.append(float((plain.reference.logits(stream.tokens, adapter)[-1] - expected).norm()))
    assert sum(rounded) < 0.05 * sum(felt)
    for stream in streams:
        stream.num_computed = 0
    driver.run(streams, 6, prefill_tokens=5)
    for stream, adapter in mixed:
        assert stream.output == family.reference.greedy(stream.prompt, adapter, 6)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_chunks_and_resumed_answers_keep_what_a_whole_pass_keeps(family_of: FamilyOf, name: str) -> None:
    """What a step has just written is read as it is kept, too: nothing depends on where a prompt was cut."""
    loaded = family_of(name + KV_IN_FP8).loaded
    runner = make_runner(loaded, num_blocks=200)
    driver, prompt = Driver(runner), prompts(1, seed=5, shortest=33, longest=33)[0]
    whole = Stream(prompt)
    driver.run([whole], 12)
    for chunk_tokens in (1, 3, 7, 16):
        stream = Stream(prompt)
        driver.run([stream], 12, prefill_tokens=chunk_tokens)
        assert stream.output == whole.output
        assert_alike(kept(runner, stream), kept(runner, whole))
    resumed = Stream(prompt, output=whole.output[:7])  # elsewhere: prompt and answer are computed again
    driver.run([resumed], 12)
    assert resumed.output == whole.output
    assert_alike(kept(runner, resumed), kept(runner, whole))


def test_scales_are_powers_of_two_with_room_above_what_is_found(family_of: FamilyOf) -> None:
    loaded = family_of("qwen2").loaded
    scales = with_fp8_kv(loaded).spec.kv.scales
    assert len(scales) == len(loaded.spec.kv.places)
    assert all(math.frexp(scale)[0] == 0.5 for pair in scales for scale in pair)
    assert with_fp8_kv(load_model(str(family_of("qwen2").folder))).spec.kv.scales == scales, "another worker's differ"
    assert loaded.spec.kv.scales == ()
    assert loaded.spec.kv.token_bytes(torch.float32) == 4 * with_fp8_kv(loaded).spec.kv.token_bytes(torch.float32)


def with_large_keys(source: Path, folder: Path, value: float = LARGE) -> LoadedModel:
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[::5] = value
    model.save_pretrained(folder)
    return load_model(str(folder))


def test_keys_that_no_code_holds_without_a_scale(
    family_of: FamilyOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = with_fp8_kv(with_large_keys(family_of("qwen2").folder, tmp_path / "model"))
    assert all(keys * FP8_LARGEST > 8 * LARGE for keys, _ in loaded.spec.kv.scales)
    assert "keys of up to 9" in caplog.text
    reference = reference_of(tmp_path / "model", {}, loaded.spec.kv.scales)
    driver = Driver(make_runner(loaded))
    streams = [Stream(prompt) for prompt in prompts(3)]
    driver.run(streams, 6)
    assert [stream.output for stream in streams] == [reference.greedy(each.prompt, None, 6) for each in streams]
    whole = reference_of(tmp_path / "model", {})
    cut = reference_of(tmp_path / "model", {}, [(1.0, values) for _, values in loaded.spec.kv.scales])
    near, far = (
        sum(float((x.logits(s.prompt, None) - whole.logits(s.prompt, None)).norm()) for s in streams)
        for x in (reference, cut)
    )
    assert near < far, "a scale of 1 cuts these keys off"


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("bfloat16", 2)])
def test_a_pool_of_the_same_bytes_holds_more_tokens(
    family_of: FamilyOf, tmp_path: Path, dtype: str, times: int
) -> None:
    """As blocks, which all accounts are in."""
    settings = settings_of(family_of("llama").folder, tmp_path, dtype=dtype, host_kv_mb=1.0)
    fp8 = build_engine(settings)
    plain = build_engine(dataclasses.replace(settings, kv_cache_dtype="auto"))
    assert fp8.model.kv_block_bytes * times == plain.model.kv_block_bytes
    assert fp8.runner.num_blocks == MIB // fp8.model.kv_block_bytes
    assert fp8.runner.num_blocks // times == plain.runner.num_blocks
    assert isinstance(fp8.runner, TorchModelRunner)
    assert fp8.runner.host_kv.num_blocks == fp8.runner.num_blocks
    assert fp8.runner._cache.size_bytes == fp8.runner.num_blocks * fp8.model.kv_block_bytes
    assert (plain.model.dtype, fp8.model.dtype) == (dtype, f"{dtype}, KV in fp8"), "one pool takes one of them"


def test_a_block_that_no_part_of_an_adapter_fits_in_is_refused(family_of: FamilyOf, tmp_path: Path) -> None:
    """On a GPU, where both lie in one arena."""
    loaded = family_of("llama" + KV_IN_FP8).loaded
    settings = settings_of(family_of("llama").folder, tmp_path)
    token_bytes = loaded.spec.kv.token_bytes(torch.float32)
    with pytest.raises(ModelRefused, match=r"--block-size 16: a block of KV in fp8 has 3072 .*: set --block-size 32"):
        _check_block(loaded, settings, 16 * token_bytes)
    _check_block(loaded, dataclasses.replace(settings, block_size=32), 32 * token_bytes)
    _check_block(loaded, dataclasses.replace(settings, max_lora_rank=8), 16 * token_bytes)


def test_the_refusal_says_the_block_of_gemma_4_e2b(family_of: FamilyOf, tmp_path: Path) -> None:
    """Of 35 layers 15 write keys and values, each fifth of them wide; feed-forward layers are up to 12,288 wide."""
    shapes = [(1, 512 if i % 5 == 4 else 256) for i in range(35)]
    sources = [*range(15), *(14 if i % 5 == 4 else 13 for i in range(15, 35))]
    kv = dataclasses.replace(KvGeometry.of(shapes, sources), scales=((1.0, 1.0),) * 35)
    site = SimpleNamespace(experts=0, in_features=1536, slots=[slice(0, 12_288), slice(12_288, 24_576)])
    loaded: Any = SimpleNamespace(sites=[site], spec=SimpleNamespace(kv=kv), dtype=torch.bfloat16)
    settings = settings_of(family_of("llama").folder, tmp_path, block_size=16)
    token_bytes = kv.token_bytes(torch.bfloat16)
    assert token_bytes == 2 * (12 * 256 + 3 * 512)
    with pytest.raises(ModelRefused, match=r"--block-size 16: .* up to 393216: set --block-size 64$"):
        _check_block(loaded, settings, 16 * token_bytes)
    _check_block(loaded, dataclasses.replace(settings, block_size=64), 64 * token_bytes)


def test_keys_that_are_no_numbers_are_refused(family_of: FamilyOf, tmp_path: Path) -> None:
    loaded = with_large_keys(family_of("qwen2").folder, tmp_path / "model", math.inf)
    with pytest.raises(ModelRefused, match=r"--kv-cache-dtype fp8: .* no numbers"):
        with_fp8_kv(loaded)


def test_a_gpu_whose_kernels_know_no_fp8_is_refused(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    loaded = dataclasses.replace(family_of("llama").loaded, device=torch.device("cuda"))
    with pytest.raises(ModelRefused, match=r"--kv-cache-dtype fp8: A100 has no FP8.*8\.9 .*--kv-cache-dtype auto"):
        with_fp8_kv(loaded)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_the_bench_of_quality_runs_models_with_states_too(family_of: FamilyOf, name: str) -> None:
    windows = prompts(2, seed=3, shortest=40, longest=40)
    found, plain = (
        perplexity((how, str(family_of(name).folder), torch.float32, "none"), windows, 1)[0]
        for how in (KV_FP8, "plain")
    )
    assert found == pytest.approx(plain, rel=0.2)
    assert found != plain
