"""The rotation's kernel where LoRA's outputs are computed apart: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.attention import PagedLayout
from manylora_worker.models.cuda.kernels.rotate import rotate_store, row_angles
from manylora_worker.models.layers.fp8_codes import FP8, codes_of
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kv_products", "scales"), [(0, False), (1, False), (2, False), (2, True)])
def test_what_of_keys_and_values_is_made(kv_products: int, scales: bool, device: str) -> None:
    """Values of the keys' columns, or none of either; values normed, heads with a norm of their own before rotation;
    queries scaled by their position behind it."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim, eps = 4, 2, 16, 1e-5
    qkv = torch.randn(1, ROWS, (heads + kv_products * kv_heads) * head_dim)
    angles, weights, by_position = torch.randn(ROWS, head_dim // 2), torch.rand(2, head_dim), 1 + torch.rand(ROWS)
    indices = torch.arange(ROWS, dtype=torch.int32, device=device)
    layout = PagedLayout(block_size=1, stride_block=64, stride_token=32, stride_kv=32, stride_head=16)
    q, cache = torch.zeros(ROWS, heads * head_dim, device=device), torch.full((ROWS * 64,), 7.0, device=device)
    rotate_store(
        qkv.to(device), q, cache, tables=indices[:, None].repeat(1, ROWS).flip(0), table_rows=indices,
        positions=indices, cos=angles.cos().to(device), sin=angles.sin().to(device), q_norm=weights[0].to(device),
        k_norm=weights[1].to(device) if kv_products else None, eps=eps, weight_plus_one=False, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, layout=layout,
        num_rows=torch.tensor(ROWS_THERE, dtype=torch.int32, device=device), lora=None, num_slots=3,
        kv_products=kv_products, norms_values=True, query_scales=by_position.to(device) if scales else None, pdl=False,
    )  # fmt: skip
    made = qkv[0].view(ROWS, -1, head_dim)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        one, two = torch.nn.functional.rms_norm(x, (head_dim,), weight, eps).chunk(2, 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), 2).flatten(1)

    queries = rotated(made[:, :heads], weights[0]) * (by_position[:, None] if scales else 1)
    torch.testing.assert_close(q[:ROWS_THERE].cpu(), queries[:ROWS_THERE])
    stored = torch.full((ROWS, 2, 32), 7.0)
    if kv_products:
        values = made[:, heads + (kv_products - 1) * kv_heads :]
        stored[:, 0] = rotated(made[:, heads : heads + kv_heads], weights[1])
        stored[:, 1] = torch.nn.functional.rms_norm(values, (head_dim,), None, eps).flatten(1)
        stored = stored.flip(0)
        stored[: ROWS - ROWS_THERE] = 7.0
    torch.testing.assert_close(cache.view(ROWS, 2, 32).cpu(), stored)


@pytest.mark.parametrize("device", DEVICES)
def test_row_angles(device: str) -> None:
    """Rows of a slot with frequencies of its own by these, the others by the table; padding is left alone."""
    torch.manual_seed(0)
    half, tokens = 4, 100_000
    table = torch.randn(tokens, half, device=device)
    ropes = torch.zeros(3, half + 1, device=device)
    ropes[2] = torch.tensor([1.0, 0.3, 0.01, 1e-4, 1.25], device=device)
    positions = torch.tensor([7, 99_999, 131_071, 0, 5], dtype=torch.int32, device=device)
    adapters = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=device)
    cos, sin = torch.zeros(2, 5, half, device=device).unbind(0)
    row_angles(
        cos, sin, positions=positions, row_adapters=adapters, ropes=ropes, cos=table, sin=-table,
        num_rows=torch.tensor(4, dtype=torch.int32, device=device),
    )  # fmt: skip
    angles = positions[2:4, None].float() * ropes[2, :half]
    expected = torch.cat((table[[7, 99_999]], angles.cos() * 1.25, torch.zeros(1, half, device=device)))
    torch.testing.assert_close(cos, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[2:4], angles.sin() * 1.25, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:2], -table[[7, 99_999]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [4, 8], ids=["part is rotated", "all is"])
def test_keys_and_values_in_fp8(half: int, device: str) -> None:
    """As the CPU's path keeps them, to the last bit: rounded to the nearest, at most the largest, a NaN as one."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 2, 2, 16
    qkv = 100 * torch.randn(1, ROWS, (heads + 2 * kv_heads) * head_dim, device=device)
    qkv[0, 1, -3:] = torch.tensor([1e5, 0.0, -1e9], device=device)
    qkv[0, 1, -14::4] = float("nan")  # with what rotates with it
    indices = torch.arange(ROWS, dtype=torch.int32, device=device)
    angles = torch.zeros(ROWS, half, device=device)  # so that rotating rounds nothing
    layout = PagedLayout(block_size=2, stride_block=128, stride_token=32, stride_kv=64, stride_head=16)
    scales, cuts = (2.0, 0.25), torch.zeros(1, dtype=torch.int64, device=device)
    q, cache = torch.zeros(ROWS, heads * head_dim, device=device), torch.zeros(ROWS * 128, device=device).to(FP8)
    rotate_store(
        qkv, q, cache, tables=indices[:, None].repeat(1, 4), table_rows=indices, positions=indices % 2,
        cos=angles.cos(), sin=angles.sin(), q_norm=None, k_norm=None, eps=1e-5, weight_plus_one=False,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, layout=layout,
        num_rows=torch.tensor(ROWS, dtype=torch.int32, device=device), lora=None, num_slots=3, scales=scales, cuts=cuts,
        pdl=False,
    )  # fmt: skip
    written = qkv[0].view(ROWS, -1, kv_heads * head_dim)[:, 1:]
    limits = 448 * torch.tensor(scales, device=device)[:, None]
    assert int(cuts) == int((written.abs() > limits).sum()) > ROWS
    kept = cache.view(torch.uint8).view(ROWS, 2, 2, 32)  # block, keys and values, token
    for row in range(ROWS):
        for which, scale in enumerate(scales):
            assert torch.equal(kept[row, which, row % 2], codes_of(written[row, which], scale).view(torch.uint8))
    assert torch.equal(q, qkv[0, :, : heads * head_dim]), "queries stay as they are"
