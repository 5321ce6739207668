"""The rotation's kernel where LoRA's outputs are computed apart: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.attention import PagedLayout
from manylora_worker.models.cuda.kernels.rotate import rotate_store
from test_add_norm import ROWS, ROWS_THERE, only_outputs

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels


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
