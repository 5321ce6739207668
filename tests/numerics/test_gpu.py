"""The same code on a CUDA device: mixed batches of adapters against transformers + peft on the CPU, in fp32."""

from __future__ import annotations

import pytest
import torch
from manylora_worker.models.loader import load_model

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import Driver, make_runner, mixed_streams
from tests.numerics.families import FAMILIES

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""Another order of summation on another device."""


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_5_text", "gemma4_text", "gemma4_wide"])
def test_mixed_batch_on_the_device(family_of: FamilyOf, name: str) -> None:
    on_cpu = family_of(name)
    family = Family(
        name, on_cpu.folder, on_cpu.adapters, load_model(str(on_cpu.folder), device="cuda"), on_cpu.reference
    )
    driver = Driver(make_runner(family.loaded, num_blocks=300))
    mixed = mixed_streams(family, driver)
    streams = [stream for stream, _ in mixed]
    logits = driver.logits(streams)
    for row, (stream, adapter) in zip(logits, mixed, strict=True):
        expected = on_cpu.reference.logits(stream.tokens, adapter)[-1]
        torch.testing.assert_close(row.cpu(), expected, atol=TOLERANCE, rtol=0)
    for stream in streams:
        stream.output.append(stream.prompt[0])
    driver.run(streams, 6, prefill_tokens=5)
    for stream, adapter in mixed:
        own = on_cpu.reference.greedy(stream.prompt + stream.output[:1], adapter, 5)
        assert stream.output[1:] == own
