"""The norm's kernel where LoRA's outputs are computed apart: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.add_norm import add_norm
from manylora_worker.models.cuda.kernels.lora import LoraRows

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels

ROWS, ROWS_THERE = 6, 5


def only_outputs(outputs: torch.Tensor) -> LoraRows:
    """Weights and tables that cannot be read: whatever is added is the outputs."""
    nothing = torch.empty(0, device=outputs.device)
    tables = nothing.int()
    return LoraRows(nothing, nothing.long(), tables, ROWS, tables, nothing.view(0, 0, 0), 1, outputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("has_post", "has_pre"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_add_norm(has_post: bool, has_pre: bool, factor: float, device: str) -> None:
    torch.manual_seed(0)
    delta, outputs = torch.randn(1, ROWS, 80, device=device), torch.randn(ROWS, 80, device=device)
    weight = torch.rand(80, device=device)
    there = torch.tensor(ROWS_THERE, dtype=torch.int32, device=device)
    found = []
    for product, lora in ((delta, only_outputs(outputs)), (delta + outputs, None)):
        residual, out = torch.ones(ROWS, 80, device=device), torch.zeros(ROWS, 80, device=device)
        add_norm(
            product,
            residual,
            out,
            post_weight=weight if has_post else None,
            pre_weight=weight if has_pre else None,
            eps=1e-5,
            weight_plus_one=False,
            num_rows=there,
            counters=torch.zeros(ROWS, dtype=torch.int32, device=device),
            lora=lora,
            factor=factor,
            pdl=False,
        )
        found.append((residual, out))
        assert has_pre or torch.equal(out[:ROWS_THERE], residual[:ROWS_THERE])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    joined = (delta + outputs)[0, :ROWS_THERE]
    if has_post:
        joined = torch.nn.functional.rms_norm(joined, (80,), weight, 1e-5)
    torch.testing.assert_close(found[1][0][:ROWS_THERE], (1 + joined) * factor)
