"""A pass's products: the base model's, and LoRA on them, by whichever kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from manylora_worker.models import loader

pytest.importorskip("triton", reason="the products are of kernels in Triton")

from manylora_worker.models.cuda.forward import products as module
from manylora_worker.models.cuda.forward.device_step import DeviceStep, LoraStep
from manylora_worker.models.cuda.kernels.combine import combine
from manylora_worker.models.cuda.kernels.lora_tiles import LoraTiles
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.weights.source import read_adapter

from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS
from tests.numerics.interpreter import needs_interpreter
from tests.numerics.reference_tiles import ReferenceTiles
from tests.numerics.test_cuda_runner import make_device_runner

pytestmark = [pytest.mark.kernels, needs_interpreter]
ROWS = 5


def step_of(lora: LoraStep | None) -> DeviceStep:
    unread = torch.empty(0)
    num_rows = torch.tensor([ROWS], dtype=torch.int32)
    return DeviceStep(ROWS, num_rows, unread, unread, unread, unread, ROWS, 1, lora=lora)


@pytest.mark.parametrize("kernels", ["by row", "by tile", "CUDA tiles"])
def test_a_product_and_its_adapter_add_up(family_of: FamilyOf, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers, alone and where ranks would be summed. A row without an adapter has the base product."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    if kernels == "CUDA tiles":
        monkeypatch.setattr(module, "FEWEST_ROWS", 1)
        monkeypatch.setattr(LoraTiles, "where_it_runs", lambda *_: ReferenceTiles())
    family = family_of("llama")
    loaded, runner = make_device_runner(family, family.folder, "cpu")
    adapter = read_adapter(family.adapters["all-linear"], loaded.adapter_base(), LIMITS)
    runner.reserve_adapter(adapter)
    runner.fill_adapter(adapter)
    slot = runner._adapters.slot_of(adapter.uid)
    tiles = torch.tensor([[0, 1, 0, 2], [1, ROWS - 1, slot, 0]], dtype=torch.int32)
    rows = torch.tensor([0] + [slot] * (ROWS - 1), dtype=torch.int32)
    lora = LoraStep(tiles, 0 if kernels == "by row" else 2, rows)
    weights = read_decoder(loaded)
    assert weights is not None
    products, placed = runner._decoder._products, adapter.on(torch.device("cpu")).sites
    for projection in (each for layer in weights.layers for each in (layer.mixer.o, layer.mlp.down)):  # type: ignore[union-attr]
        x, out = torch.randn(ROWS, projection.in_features), torch.zeros(ROWS, projection.out_features)
        base = x @ projection.weight.T
        (own,) = placed[projection.site.index].slots
        added = x @ placed[projection.site.index].a_t @ own.b
        added[0] = 0
        product, found = products.of(projection, x, out, step_of(None))
        assert found is None
        torch.testing.assert_close(product.sum(0), base, atol=1e-5, rtol=1e-4)
        for of in (products.of, products.summed):
            product, found = of(projection, x, out, step_of(lora))
            assert found is not None
            assert (found.outputs is not None) == (kernels == "CUDA tiles")
            whole = torch.empty_like(out)
            combine(product, whole, num_rows=step_of(None).num_rows, lora=found, pdl=False)
            torch.testing.assert_close(whole, base + added, atol=1e-5, rtol=1e-4)
        product, found = products.of(projection, x, out, step_of(replace(lora, columns=True)))
        assert found is not None
        assert found.outputs is None, "those kernels know nothing of gains"
