"""Mixtures of experts on the device decoder: every kernel, against transformers + peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models import loader
from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.quantized.stacks import nf4_stack, put_stack

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.forward import expert_mlp, mlp
from manylora_worker.models.cuda.forward.pass_sizes import buffer_bytes
from manylora_worker.models.cuda.kernels.experts_lora_tiles import shrink_tiles
from manylora_worker.models.decoder.read import read_decoder

from tests.numerics.driver import Driver
from tests.numerics.interpreter import DEVICES
from tests.numerics.mixtures import OWN_PATTERNS, Mixture, make_mixture, streams_of
from tests.numerics.quantizing import experts_to_nf4
from tests.numerics.test_cuda_runner import make_device_runner, put_device_adapter

pytestmark = [pytest.mark.kernels, OWN_PATTERNS]
TOLERANCE = 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe", "qwen3_5_moe_text", "qwen3_next", "gemma4_moe"])
def test_a_mixed_batch_on_the_device(family: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(make_mixture(tmp_path, family), device, "none", monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "shipped", "quantization"),
    [
        ("qwen3_moe", "", "fp8"), ("gpt_oss", "", "fp8"), ("qwen3_5_moe_text", "", "fp8"), ("gemma4_moe", "", "fp8"),
        ("qwen3_moe_wide", "fp8", "fp8"), ("qwen3_moe_wide", "awq-64", "int4"), ("qwen3_moe_wide", "gptq-sym", "int4"),
    ],
)  # fmt: skip
def test_experts_in_codes_on_the_device(
    family: str, shipped: str, quantization: Quantization, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    mixture = make_mixture(tmp_path, family, shipped=shipped, quantization=quantization)
    check_device(mixture, device, quantization, monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_moe_wide", "qwen3_5_moe_blocks", "qwen3_next_blocks", "gpt_oss_blocks"])
def test_experts_in_nf4_on_the_device(
    family: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is not of experts as it is: dense layers in NF4 take bf16, in which routers choose otherwise."""
    mixture, load_model = make_mixture(tmp_path, family, rounds=experts_to_nf4), loader.load_model

    def in_nf4(folder: str, *, device: str, quantization: Quantization) -> loader.LoadedModel:
        loaded = load_model(folder, device=device, quantization=quantization)
        for experts in (each for each in loaded.model.modules() if isinstance(each, LoraExperts)):
            for name in ("gate_up", "down"):  # made on the CPU, as the reference's are: its sums have that order
                stack = nf4_stack(getattr(experts, name).data, torch.device("cpu"), torch.device(device))
                put_stack(experts, name, stack)
        return loaded

    monkeypatch.setattr(loader, "load_model", in_nf4)
    check_device(mixture, device, "none", monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_by_tile_on_the_device(
    family: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few rows: as long prompts have them."""
    taken = []

    def shrink(*arguments: object, **more: object) -> None:
        taken.append(arguments)
        shrink_tiles(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(expert_mlp, "shrink_tiles", shrink)
    monkeypatch.setattr(expert_mlp, "tile_pairs", lambda *_: 64)
    monkeypatch.setattr(mlp, "_ROWS_A_TILE", 1)
    check_device(make_mixture(tmp_path, family), device, "none", monkeypatch)
    assert taken


def check_device(mixture: Mixture, device: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, then decoding rows, of all adapters; on a GPU in graphs, and prompts in chunks."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    monkeypatch.setattr("tests.numerics.driver.put_adapter", put_device_adapter)
    loaded, runner = make_device_runner(
        mixture,
        mixture.folder,
        device,
        marks_free=True,
        quantization=quantization,  # type: ignore[arg-type]
    )
    driver = Driver(runner)  # type: ignore[arg-type]
    mixed = streams_of(mixture, driver, 1, loaded, longest=40 if device == "cuda" else 4)
    streams = [stream for stream, _ in mixed]
    for round_number in range(2 if device == "cuda" else 1):
        for row, (stream, name) in zip(driver.logits(streams), mixed, strict=True):
            expected = mixture.references[name].logits(stream.tokens, name)[-1]
            torch.testing.assert_close(row.cpu(), expected, atol=TOLERANCE, rtol=0)
        for stream in streams:
            stream.output.append(stream.prompt[round_number])
    if device == "cuda":
        driver.run(streams, 8, prefill_tokens=5)
        for stream, name in mixed:
            own = mixture.references[name].greedy(stream.prompt + stream.output[:2], name, 6)
            assert stream.output[2:] == own


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "gemma4_moe"])
def test_what_is_kept_for_steps_is_what_they_take(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    mixture = make_mixture(tmp_path, family)
    loaded, runner = make_device_runner(mixture, mixture.folder, "cpu")  # type: ignore[arg-type]
    built = runner._decoder
    owners = [built, built._products, built._mlp, built._mlp._experts, built._delta_pass]
    ours = (built._ropes, built._products._sites, built._products._arena)
    held = [value for each in owners if each is not None for value in vars(each).values()]
    taken = sum(each.nbytes for each in held if isinstance(each, torch.Tensor) and not any(each is o for o in ours))
    weights = read_decoder(loaded)
    assert weights is not None
    chunks = runner._adapters.chunks
    assert buffer_bytes(weights, loaded.dtype, lora_chunks=chunks, max_rows=1024, max_decode_rows=32) == taken
