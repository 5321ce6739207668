from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.experts_product import grouped_product, tile_pairs
from manylora_worker.models.cuda.kernels.experts_route import TILE_FIELDS, Groups, group, most_tiles
from manylora_worker.models.cuda.kernels.nf4_format import CODEBOOK
from manylora_worker.models.decoder.weights import ExpertActivation
from manylora_worker.models.layers.mixture import clamped_swiglu
from manylora_worker.models.quantized.stacks import QuantizedStack, nf4_stack, quantized_stack

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels
FORMATS = ["fp8", "fp8 in blocks", "4 bits", "4 bits, shifted"]
ON_GPU = [(rows, 128, 8, 2048, 768) for rows in (1, 40, 500, 2000)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize(("rows", "count", "top_k", "hidden", "width"), [(21, 3, 2, 72, 40), *ON_GPU])
def test_products_with_each_pairs_expert(
    rows: int, count: int, top_k: int, hidden: int, width: int, activation: ExpertActivation, device: str
) -> None:
    if device == "cpu" and hidden > 100:
        pytest.skip("a real shape takes minutes in the interpreter")
    torch.manual_seed(rows)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    biases = torch.randn(count, 2 * width, device=device), torch.randn(count, hidden, device=device)
    of_both, of_down = (None, None) if activation == "silu" else (each.to(dtype) for each in biases)
    gate_up = (torch.randn(count, 2 * width, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, width, device=device) * width**-0.5).to(dtype)
    chosen, groups = grouped(rows, count, top_k, device)
    both, gated, outputs = (x.new_full((len(chosen), columns), 7.0) for columns in (2 * width, width, hidden))
    grouped_product(x, gate_up, both, groups, bias=of_both, pairs_a_row=top_k, halves=2, pdl=False)
    grouped_product(x, gate_up, gated, groups, bias=of_both, pairs_a_row=top_k, gates=activation, halves=2, pdl=False)
    grouped_product(gated, down, outputs, groups, bias=of_down, pairs_a_row=1, pdl=False)
    for expert in range(count):
        own = (chosen == expert).nonzero()[:, 0]
        wide = x[own // top_k].float() @ gate_up[expert].float().T
        if of_both is not None:
            wide += of_both[expert].float()
        tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
        torch.testing.assert_close(both[own].float(), wide, **tolerance)
        first, second = wide.chunk(2, 1)
        joined = F.silu(first) * second if activation == "silu" else clamped_swiglu(first, second)
        torch.testing.assert_close(gated[own].float(), joined, **tolerance)
        made = gated[own].float() @ down[expert].float().T
        if of_down is not None:
            made += of_down[expert].float()
        torch.testing.assert_close(outputs[own].float(), made, **tolerance)
    assert (both[-top_k:] == 7.0).all()
    assert (outputs[-top_k:] == 7.0).all()


def grouped(rows: int, count: int, top_k: int, device: str) -> tuple[torch.Tensor, Groups]:
    """Each pair's expert, drawn, and the pairs by expert."""
    chosen = torch.rand(rows, count, device=device).topk(top_k).indices.flatten().int()
    chosen[-top_k:] = count  # the last row is not there
    block_m = tile_pairs(len(chosen), count)
    tiles = torch.zeros(most_tiles(len(chosen), count, block_m), TILE_FIELDS, dtype=torch.int32, device=device)
    groups = Groups(torch.zeros_like(chosen), tiles, torch.zeros(1, dtype=torch.int32, device=device), block_m)
    group(chosen, groups, num_experts=count, pdl=False)
    return chosen, groups


def in_codes(weight: torch.Tensor, name: str, inputs_of_scale: int) -> QuantizedStack:
    """weight: [experts, out, in], for its shape alone where codes are not of outputs."""
    stack, (experts, outputs, inputs) = quantized_stack(weight.float()), weight.shape
    if name == "fp8":
        return QuantizedStack(stack.parts, 0, weight.dtype)
    if "4 bits" in name and inputs % inputs_of_scale:
        inputs_of_scale = inputs  # such a group has as many as the others
    shape = (experts, outputs, -(-inputs // inputs_of_scale))
    scales = (torch.rand(shape, device=weight.device) + 0.5) * inputs**-0.5 / 100
    if name == "fp8 in blocks":
        return QuantizedStack((stack.codes, scales), inputs_of_scale, weight.dtype)
    codes = torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=weight.device)
    shifts = torch.randint(-7, 9, shape, device=weight.device) * scales * (name == "4 bits, shifted")
    return QuantizedStack((codes, scales * 20, shifts * 20), inputs_of_scale, weight.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "width", "size"),
    [
        (21, 3, 2, 96, 64, 32), (90, 2, 2, 64, 32, 32), (3, 3, 2, 160, 72, 64),
        *((*shape, 128) for shape in ON_GPU), (9, 256, 8, 2048, 512, 128), (3000, 256, 8, 2048, 512, 64),
    ],
)  # fmt: skip
def test_products_with_codes(
    rows: int, count: int, top_k: int, hidden: int, width: int, size: int, name: str, device: str
) -> None:
    """Against the rebuilt weight: a tile of few pairs, of many, and inputs that no block divides."""
    if device == "cpu" and hidden > 200:
        pytest.skip("a real shape takes minutes in the interpreter")
    torch.manual_seed(rows)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    gate_up = in_codes(torch.randn(count, 2 * width, hidden, device=device, dtype=dtype) * hidden**-0.5, name, size)
    down = in_codes(torch.randn(count, hidden, width, device=device, dtype=dtype) * width**-0.5, name, size)
    assert gate_up.has_kernel
    bias = torch.randn(count, 2 * width, device=device).to(dtype) if rows % 2 else None
    chosen, groups = grouped(rows, count, top_k, device)
    both, gated, outputs = (x.new_full((len(chosen), columns), 7.0) for columns in (2 * width, width, hidden))
    grouped_product(x, gate_up, both, groups, bias=bias, pairs_a_row=top_k, halves=2, pdl=False)
    grouped_product(x, gate_up, gated, groups, bias=bias, pairs_a_row=top_k, gates="silu", halves=2, pdl=False)
    grouped_product(gated, down, outputs, groups, pairs_a_row=1, pdl=False)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for expert in range(count):
        own = (chosen == expert).nonzero()[:, 0]
        wide = x[own // top_k].float() @ whole(gate_up, expert).T
        wide += 0.0 if bias is None else bias[expert].float()
        torch.testing.assert_close(both[own].float(), wide, **tolerance)
        first, second = wide.chunk(2, 1)
        torch.testing.assert_close(gated[own].float(), F.silu(first) * second, **tolerance)
        torch.testing.assert_close(outputs[own].float(), gated[own].float() @ whole(down, expert).T, **tolerance)
    assert (both[-top_k:] == 7.0).all()
    assert (outputs[-top_k:] == 7.0).all()


def whole(stack: QuantizedStack, expert: int) -> torch.Tensor:
    return QuantizedStack(stack.parts, stack.group_size, torch.float32, is_nf4=stack.is_nf4)[expert]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "width", "outputs"),
    [
        *((rows, 8, 2, 128, 72, 100) for rows in (1, 2, 7, 16, 33, 64)), (100, 2, 2, 64, 40, 72),
        *((rows, 128, 8, 2048, 768, 2048) for rows in (1, 8, 32, 64, 500, 2000)), (9, 256, 8, 2048, 512, 2048),
    ],
)  # fmt: skip
def test_products_with_nf4(
    rows: int, count: int, top_k: int, hidden: int, width: int, outputs: int, device: str
) -> None:
    """Against the weight taken apart: experts without rows, tiles of few pairs and of many, cut ones at both ends."""
    if device == "cpu" and hidden > 200:
        pytest.skip("a real shape takes minutes in the interpreter")
    torch.manual_seed(rows)
    on = torch.device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows + 1, hidden, device=on, dtype=dtype)  # the last is not there
    gate_up = nf4_stack((torch.randn(count, 2 * width, hidden, device=on) * hidden**-0.5).to(dtype), on, on)
    down = nf4_stack((torch.randn(count, outputs, hidden, device=on) * hidden**-0.5).to(dtype), on, on)
    bias = torch.randn(count, 2 * width, device=on).to(dtype) if rows % 2 else None
    chosen, groups = grouped(rows + 1, count, top_k, device)
    both, gated, made = (x.new_full((len(chosen), columns), 7.0) for columns in (2 * width, width, outputs))
    grouped_product(x, gate_up, both, groups, bias=bias, pairs_a_row=top_k, halves=2, pdl=False)
    grouped_product(x, gate_up, gated, groups, bias=bias, pairs_a_row=top_k, gates="silu", halves=2, pdl=False)
    grouped_product(x, down, made, groups, pairs_a_row=top_k, pdl=False)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for expert in range(count):
        own = (chosen == expert).nonzero()[:, 0]
        inputs = x[own // top_k].float()
        wide = inputs @ whole(gate_up, expert).T
        wide += 0.0 if bias is None else bias[expert].float()
        torch.testing.assert_close(both[own].float(), wide, **tolerance)
        first, second = wide.chunk(2, 1)
        torch.testing.assert_close(gated[own].float(), F.silu(first) * second, **tolerance)
        torch.testing.assert_close(made[own].float(), inputs @ whole(down, expert).T, **tolerance)
    for each in (both, gated, made):
        assert (each[-top_k:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_of_nf4_is_what_it_stands_for(dtype: torch.dtype, device: str) -> None:
    """At every input of a block, in each half of a byte, times its scale in the type of x."""
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("PTX looks them up, which test_nf4_lookup.py runs")
    on = torch.device(device)
    codes = torch.arange(16, dtype=torch.uint8, device=on)
    packed = (codes << 4 | codes.flip(0)).view(1, 16, 1).expand(1, 16, 64).contiguous()  # of 128 inputs
    scales = torch.tensor([0.75, 3.0], device=on).expand(1, 16, 2).contiguous()
    stack = QuantizedStack((packed, scales), 64, dtype, is_nf4=True)
    values = torch.tensor(CODEBOOK, device=on).to(dtype)
    for pairs in (16, 64):
        order = torch.arange(pairs, dtype=torch.int32, device=on)
        tiles = torch.tensor([[0, pairs, 0, 0]], dtype=torch.int32, device=on)
        groups = Groups(order, tiles, torch.ones(1, dtype=torch.int32, device=on), pairs)
        for first in range(0, 128, pairs):
            x = torch.eye(128, device=on, dtype=dtype)[first : first + pairs]
            out = torch.zeros(pairs, 16, device=on)
            grouped_product(x, stack, out, groups, pairs_a_row=1, pdl=False)
            for row in range(pairs):
                at = first + row
                expected = (values.flip(0) if at % 2 else values) * scales[0, 0, at // 64].to(dtype)
                assert torch.equal(out[row], expected.float())


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_of_fp8_is_what_it_stands_for(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[: 2 * 254].view(2, 254)
    codes = codes[codes & 127 != 127].view(1, -1, 1).expand(1, -1, 32).contiguous().view(torch.float8_e4m3fn)
    rows = codes.shape[1]
    stack = QuantizedStack((codes.to(device), torch.ones(1, rows, 1, device=device)), 0, torch.bfloat16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for pairs in (16, 64):
        x = torch.zeros(pairs, 32, device=device, dtype=dtype)
        x[:, 5] = 1.0
        out = torch.zeros(pairs, rows, device=device, dtype=dtype)
        order = torch.arange(pairs, dtype=torch.int32, device=device)
        tiles = torch.tensor([[0, pairs, 0, 0]], dtype=torch.int32, device=device)
        groups = Groups(order, tiles, torch.ones(1, dtype=torch.int32, device=device), pairs)
        grouped_product(x, stack, out, groups, pairs_a_row=1, pdl=False)
        assert torch.equal(out.float(), codes[0, :, 0].float().to(device).expand(pairs, rows))


def test_wgmma_reads_no_codes_out_of_registers() -> None:
    """Compiled for an H100, as the kernel says why, with or without one."""
    program = [sys.executable, "-m", "tests.numerics.compiled"]
    changes = {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(program, env=os.environ | changes, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    lines = [line.split(" ", 3) for line in told.stdout.splitlines()]
    assert len(lines) == 20
    assert {(block_m == "64", kind) for _, _, block_m, kind in lines} == {
        (False, "mma.sync"), (True, "wgmma shared memory"),
        (True, "wgmma registers, waited for at once and wgmma shared memory"),  # LoRA's, behind the loop over the codes
    }  # fmt: skip
