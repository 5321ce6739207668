"""The kernels that only add LoRA's outputs, where those are computed apart: in Triton's interpreter or, marked gpu,
compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.add_norm import add_norm
from manylora_worker.models.cuda.kernels.attention import PagedLayout
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.cuda.kernels.rotate import rotate_store

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels

ROWS, ROWS_THERE = 6, 5


def only_outputs(outputs: torch.Tensor) -> LoraRows:
    """Weights and tables that cannot be read: whatever is added is the outputs."""
    nothing = torch.empty(0, device=outputs.device)
    tables = nothing.int()
    return LoraRows(nothing, nothing.long(), tables, ROWS, tables, nothing.view(0, 0, 0), 1, outputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_post", [False, True])
def test_add_norm(has_post: bool, device: str) -> None:
    torch.manual_seed(0)
    delta, outputs = torch.randn(1, ROWS, 80, device=device), torch.randn(ROWS, 80, device=device)
    weight = torch.rand(80, device=device)
    there = torch.tensor(ROWS_THERE, dtype=torch.int32, device=device)
    found = []
    for product, lora in ((delta, only_outputs(outputs)), (delta + outputs, None)):
        residual, out = torch.ones(ROWS, 80, device=device), torch.zeros(ROWS, 80, device=device)
        add_norm(
            product, residual, out, post_weight=weight if has_post else None, pre_weight=weight, eps=1e-5,
            weight_plus_one=False, num_rows=there, counters=torch.zeros(ROWS, dtype=torch.int32, device=device),
            lora=lora, pdl=False,
        )  # fmt: skip
        found.append((residual, out))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [4, 8], ids=["part is rotated", "all is"])
def test_rotate_store(half: int, device: str) -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 2, 1, 16
    width = (heads + 2 * kv_heads) * head_dim
    qkv, outputs = torch.randn(1, ROWS, width, device=device), torch.randn(ROWS, width, device=device)
    angles = torch.randn(ROWS, half, device=device)
    indices = torch.arange(ROWS, dtype=torch.int32, device=device)
    layout = PagedLayout(block_size=2, stride_block=64, stride_token=16, stride_kv=32, stride_head=16)
    found = []
    for product, lora in ((qkv, only_outputs(outputs)), (qkv + outputs, None)):
        q, cache = torch.zeros(ROWS, heads * head_dim, device=device), torch.zeros(ROWS * 64, device=device)
        rotate_store(
            product, q, cache, tables=indices[:, None].repeat(1, 4), table_rows=indices, positions=indices,
            cos=angles.cos(), sin=angles.sin(), q_norm=None, k_norm=None, eps=1e-5, weight_plus_one=False,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, layout=layout,
            num_rows=torch.tensor(ROWS_THERE, dtype=torch.int32, device=device), lora=lora, num_slots=3, pdl=False,
        )  # fmt: skip
        found.append((q, cache))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert found[0][1].any()
