"""Every kind of row in one batch of the GPU's kernels: plain, composed, DoRA, biased, with a rotation of its own, and
the base model's, each as transformers and peft compute it. The tokens of a text are given (teacher-forced). Then an
adapter in the weights, out of them and in again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.models import loader
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import recipes, save_adapter
from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import Driver, Stream, prompts
from tests.numerics.test_rope import SCALINGS, put_scaled, references

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.runner import DeviceModelRunner

from tests.numerics.interpreter import DEVICES, needs_interpreter
from tests.numerics.test_columns_on_device import TOLERANCE, Cases, cases
from tests.numerics.test_cuda_runner import make_device_runner, put_device_adapter

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings(r"ignore:Adapter 'default'. \d+ LoRA tensor"),
]
TEXT = {"cpu": 2, "cuda": 12}  # tokens that are given, by device


def rotated(family: Family, loaded: loader.LoadedModel, runner: DeviceModelRunner, folder: Path) -> Cases:
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    plain = save_adapter(model, folder / "rotated", 7, **recipes(family.name)["all-linear"])
    oracles = references(family.folder, dict.fromkeys(SCALINGS, plain))
    found: Cases = []
    for name in ("yarn", "theta"):
        uid = put_device_adapter(runner, loaded, put_scaled(plain, SCALINGS[name]).rename(folder / name))
        prompt = prompts(1, seed=len(name), shortest=5, longest=9)[0]
        found.append((Stream(prompt, AdapterUid(uid)), oracles[name], "own"))
    return found


def check_text(driver: Driver, mixed: Cases, length: int) -> None:
    """Each token's logits against the oracles'."""
    streams = [stream for stream, _, _ in mixed]
    given = prompts(len(mixed), seed=71, shortest=length, longest=length)
    for position in range(length):
        for row, (stream, oracle, adapter) in zip(driver.logits(streams), mixed, strict=True):
            torch.testing.assert_close(row.cpu(), oracle.logits(stream.tokens, adapter)[-1], atol=TOLERANCE, rtol=0)
        for stream, text in zip(streams, given, strict=True):
            stream.output.append(text[position])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=[needs_interpreter, pytest.mark.slow]), DEVICES[1]])
def test_a_given_text_beside_every_kind(
    family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of("llama")
    loaded, runner = make_device_runner(family, family.folder, device)
    driver = Driver(runner)  # type: ignore[arg-type]
    mixed = cases(family, loaded, runner, tmp_path, ["dora", "low"]) + rotated(family, loaded, runner, tmp_path)
    check_text(driver, mixed, TEXT[device])

    def again() -> torch.Tensor:
        """The same rows from their beginning; no block is one of before."""
        return driver.logits([Stream(stream.prompt, stream.adapter_uid) for stream, _, _ in mixed]).cpu()

    def base_rows() -> Cases:
        return [(Stream(prompt), family.reference, "rank-1") for prompt in prompts(3, seed=9, longest=6)]

    def in_weights() -> torch.Tensor:
        return driver.logits([stream for stream, _, _ in base_rows()]).cpu()

    before, uid = again(), put_device_adapter(runner, loaded, family.adapters["rank-1"])
    while not runner.merge_some(AdapterUid(uid)):
        pass
    merged = in_weights()
    check_text(driver, base_rows(), TEXT[device])
    while not runner.restore_some():
        pass
    assert torch.equal(again(), before)
    while not runner.merge_some(AdapterUid(uid)):
        pass
    assert torch.equal(in_weights(), merged)
