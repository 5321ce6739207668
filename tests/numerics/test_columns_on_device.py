"""DoRA and biases by the GPU's kernels: beside plain, composed and bare rows in one batch, as transformers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterUid
from manylora_worker.models import loader

from tests.numerics.adapters import Reference
from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import Driver, Stream, prompts
from tests.numerics.test_columns import BIASED, INPUTS, RECIPES, reference, save_trained

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.runner import DeviceModelRunner

from tests.numerics.interpreter import DEVICES
from tests.numerics.test_cuda_runner import make_device_runner, put_device_adapter

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings(r"ignore:Adapter 'default'. \d+ LoRA tensor"),
]
TOLERANCE = 1e-3
Cases = list[tuple[Stream, Reference, str | None]]


def cases(
    family: Family, loaded: loader.LoadedModel, runner: DeviceModelRunner, folder: Path, kinds: list[str]
) -> Cases:
    found: Cases = []
    for seed, kind in enumerate(kinds):
        own = save_trained(family.folder, folder / kind, seed, {**RECIPES, **BIASED, **INPUTS}[kind])
        uid, oracle = put_device_adapter(runner, loaded, own), reference(family.folder, own)
        found += [(Stream(prompt, uid), oracle, "own") for prompt in prompts(1 + seed % 2, seed=seed, longest=6)]
    uids = {
        name: AdapterUid(put_device_adapter(runner, loaded, family.adapters[name])) for name in ("rank-1", "excluded")
    }
    family.reference.compose("both", {"rank-1": 1.0, "excluded": -0.5})
    keys = {**uids, None: None, "both": key_of([Part(uids["rank-1"], 1.0), Part(uids["excluded"], -0.5)])}
    plain = zip(prompts(len(keys), seed=30, longest=6), keys.items(), strict=True)
    return found + [(Stream(prompt, key), family.reference, name) for prompt, (name, key) in plain]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kinds"), [
    ("llama", ["dora", "low"]),
    pytest.param("qwen2", ["both", "biases"], marks=pytest.mark.slow),
    pytest.param("qwen3", ["some"], marks=pytest.mark.gpu),
    pytest.param("gemma2", ["dora", "low"], marks=pytest.mark.gpu),
    pytest.param("gemma4_text", ["dora", "low", "inputs"], marks=pytest.mark.gpu),
    pytest.param("gemma4_wide", ["dora"], marks=pytest.mark.gpu),
])  # fmt: skip
def test_gains_and_shifts_beside_other_rows(
    family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kinds: list[str], device: str
) -> None:
    """A prompt and a decoded token each, kernel by kernel, or on a GPU in graphs of their own."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of(name)
    loaded, runner = make_device_runner(family, family.folder, device)
    driver = Driver(runner)  # type: ignore[arg-type]
    mixed = cases(family, loaded, runner, tmp_path, kinds)
    for _ in range(2):
        logits = driver.logits([stream for stream, _, _ in mixed])
        for row, (stream, oracle, adapter) in zip(logits, mixed, strict=True):
            torch.testing.assert_close(row.cpu(), oracle.logits(stream.tokens, adapter)[-1], atol=TOLERANCE, rtol=0)
        for stream, _, _ in mixed:
            stream.output.append(stream.prompt[0])
    if device == "cuda":
        assert {shape.columns for shape in (*runner._recordings, *runner._mixed_graphs)} == {True}
        streams = [stream for stream, _, _ in mixed]
        driver.run(streams, 8)
        for stream, oracle, adapter in mixed:
            assert stream.output[2:] == oracle.greedy(stream.prompt + stream.output[:2], adapter, 6)
