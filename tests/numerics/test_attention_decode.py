"""attention_decode.cu against plain torch: on a CPU through cuda_on_cpu.h and, marked gpu, compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import attention_decode, cuda_module  # noqa: E402
from manylora_worker.models.cuda.kernels.attention import (  # noqa: E402
    AttentionShape,
    DecodeScratch,
    PagedLayout,
    attend_decode,
)
from manylora_worker.models.cuda.kernels.attention_decode import DecodeAttention, Variant  # noqa: E402
from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable  # noqa: E402

from tests.numerics.cuda_on_cpu import cuda_on_cpu  # noqa: E402
from tests.numerics.interpreter import DEVICES  # noqa: E402

pytestmark = pytest.mark.kernels

POSITIONS = (0, 1, 14, 15, 16, 17, 47, 63, 100, 130, 5, 31)
PADDING = 2
"""Rows behind those that are there."""
TOLERANCE = 1e-2
FP8_SCALES = (0.125, 4.0)

PLAIN = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
SHAPES = {
    "plain": PLAIN,
    "16 wide": replace(PLAIN, head_dim=16),
    "96 wide": replace(PLAIN, head_dim=96, num_heads=4),
    "128 wide": replace(PLAIN, head_dim=128, num_heads=2),
    "eight to a head": replace(PLAIN, num_heads=16, head_dim=256),
    "three to a head": replace(PLAIN, num_heads=6),
    "window": replace(PLAIN, window=20),
    "narrow window": replace(PLAIN, window=1),
    "softcap": replace(PLAIN, softcap=2.5),
    "sinks": replace(PLAIN, num_heads=6, window=20, has_sinks=True),
    "sinks of eight to a head": replace(PLAIN, num_heads=16, has_sinks=True),
}
WIDE = replace(PLAIN, num_heads=8, num_kv_heads=1, head_dim=512, scale=0.05)
VARIANTS = (Variant(0, 1, 3, 3), Variant(0, 2, 2, 1), Variant(0, 4, 3, 2))
SPLITS = (1, 4)


@dataclass
class Case:
    shape: AttentionShape
    block_size: int
    q: torch.Tensor
    cache: torch.Tensor
    """Of two layers, the second of which is asked for; NaN wherever no row may look."""
    tables: torch.Tensor
    table_rows: torch.Tensor
    positions: torch.Tensor
    layout: PagedLayout
    expected: torch.Tensor
    """[rows, out], NaN where nothing is to be written."""
    sinks: torch.Tensor | None
    scales: tuple[float, float]

    def run(
        self, attention: DecodeAttention, device: str, splits: int = 1, max_rows: int | None = None
    ) -> torch.Tensor:
        rows = len(self.table_rows)
        q, cache, tables, table_rows, positions = (
            tensor.to(device) for tensor in (self.q, self.cache, self.tables, self.table_rows, self.positions)
        )
        out = torch.full_like(q, float("nan"))
        scratch = DecodeScratch(rows, self.shape, splits, torch.device(device))
        attention.attend(
            q, cache[self.layout.stride_block // 2 :], out, tables=tables, table_rows=table_rows[:max_rows],
            positions=positions, num_rows=torch.tensor(rows - PADDING, dtype=torch.int32, device=device),
            layout=self.layout, scratch=scratch, splits=splits, pdl=False,
            sinks=None if self.sinks is None else self.sinks.to(device), scales=self.scales,
        )  # fmt: skip
        assert not scratch.counters.any(), "the next launch counts from zero"
        return out.cpu().float()


def make_case(shape: AttentionShape, block_size: int, *, is_fp8: bool = False) -> Case:
    scales = FP8_SCALES if is_fp8 else (1.0, 1.0)
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    generator = torch.Generator().manual_seed(shape.num_heads + shape.head_dim)
    heads, dim = shape.num_kv_heads, shape.head_dim
    most = -(-(max(POSITIONS) + 1) // block_size)
    rows = len(POSITIONS) + PADDING
    num_blocks = rows * most
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(rows, most)
    table_rows = torch.randperm(rows, generator=generator).to(torch.int32)
    positions = torch.tensor([*POSITIONS, *[0] * PADDING], dtype=torch.int32)
    cache = torch.full((num_blocks, 2, block_size, 2, heads, dim), float("nan"), dtype=torch.bfloat16)
    q = torch.randn(rows, shape.num_heads * dim, generator=generator).bfloat16()
    expected = torch.full(q.shape, float("nan"))
    sinks = 3 * torch.randn(shape.num_heads, generator=generator) if shape.has_sinks else None
    for row, position in enumerate(POSITIONS):
        first = max(0, position + 1 - shape.window) if shape.window else 0
        seen = torch.randn(2, position + 1 - first, heads, dim, generator=generator)
        seen = (seen / torch.tensor(scales).view(2, 1, 1, 1)).to(dtype).bfloat16()
        for index, token in enumerate(range(first, position + 1)):
            block = order[table_rows[row], token // block_size]
            cache[block, 1, token % block_size] = seen[:, index]
        keys, values = seen.float().repeat_interleave(shape.num_heads // heads, 2)
        keys, values = keys * scales[0], values * scales[1]
        scores = torch.einsum("hd,thd->ht", q[row].float().view(-1, dim), keys) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None]), 1)
        weights = scores.softmax(1)[:, : len(values)]
        expected[row] = torch.einsum("ht,thd->hd", weights, values).flatten()
    token = 2 * heads * dim
    layout = PagedLayout(block_size, 2 * block_size * token, token, heads * dim, dim)
    kept = cache.flatten().to(dtype)
    return Case(shape, block_size, q, kept, order, table_rows, positions, layout, expected, sinks, scales)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(result.isnan(), expected.isnan())
    assert (result - expected).nan_to_num().abs().max() <= TOLERANCE * expected.nan_to_num().abs().max()


RUN_ON_CPU = """
extern "C" void run(unsigned programs, const u8* q, const u8* cache, u8* out, const int* tables, const int* table_rows,
                    const int* positions, const int* num_rows, float* partial, float* stats, int* counters,
                    const float* sinks, float scale, float value_scale, int a, int b, int c, int d, int e, int f, int g,
                    int h) {
    kernel = [=] {
        attend_decode(q, cache, out, tables, table_rows, positions, num_rows, partial, stats, counters, sinks, scale,
                      value_scale, a, b, c, d, e, f, g, h);
    };
    run_blocks({programs, 1, 1}, 32 * WARPS);
}
"""


class OnCpu(DecodeAttention):
    """The source itself, with fibers for threads (cuda_on_cpu.h): every index, wait and barrier of it."""

    def __init__(
        self, shape: AttentionShape, block_size: int, variant: Variant, programs: int, folder: Path, *, is_fp8: bool
    ) -> None:
        self._shape, self._processors, self._is_fp8 = shape, 1, is_fp8
        text = attention_decode.source(shape, block_size, variant, is_fp8=is_fp8)
        run = cuda_on_cpu(text + RUN_ON_CPU, folder).run

        class Kernel:
            def launch(self, grid: tuple[int, int, int], *sizes: Any, pdl: bool) -> None:
                run(min(programs, grid[0]), *map(cuda_module._value, sizes[-1]))

        self._kernels: Any = [(variant, Kernel())]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    def on_cpu(shape: AttentionShape, block_size: int, variant: Variant, is_fp8: bool = False) -> tuple[Any, str]:
        if shutil.which("g++") is None:
            pytest.skip("needs a C++ compiler")
        # Fewer programs than items: one takes several.
        return OnCpu(shape, block_size, variant, 5, tmp_path, is_fp8=is_fp8), "cpu"

    def on_gpu(shape: AttentionShape, block_size: int, variant: Variant, is_fp8: bool = False) -> tuple[Any, str]:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        return DecodeAttention(shape, block_size, torch.device("cuda"), [variant], is_fp8=is_fp8), "cuda"

    return on_cpu if request.param == "cpu" else on_gpu


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *[("plain", variant) for variant in VARIANTS],
        *[(name, VARIANTS[i % len(VARIANTS)]) for i, name in enumerate(SHAPES) if name != "plain"],
        ("window", VARIANTS[1]),
    ],
    ids=str,
)
def test_attends_to_what_rows_may_see(build: Any, name: str, variant: Variant) -> None:
    shape = SHAPES[name]
    attention, device = build(shape, 16, variant)
    case = make_case(shape, 16)
    for splits in SPLITS:
        assert_close(case.run(attention, device, splits), case.expected)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.head_dim % 32 == 0])
def test_attends_to_codes_of_fp8(build: Any, name: str) -> None:
    """Each is a number exactly, so only queries, weights and sums are rounded, as with bf16."""
    shape = SHAPES[name]
    variant = VARIANTS[list(SHAPES).index(name) % len(VARIANTS)]
    attention, device = build(shape, 16, variant, is_fp8=True)
    case = make_case(shape, 16, is_fp8=True)
    for splits in SPLITS:
        assert_close(case.run(attention, device, splits), case.expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "96 wide", "window", "softcap", "sinks"])
def test_codes_of_fp8_in_the_kernel_for_other_devices(device: str, name: str) -> None:
    shape = SHAPES[name]
    attention: Any = SimpleNamespace(attend=partial(attend_decode, shape=shape))
    case = make_case(shape, 16, is_fp8=True)
    case = replace(case, q=case.q.float())
    for splits in SPLITS:
        assert_close(case.run(attention, device, splits), case.expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [SHAPES["sinks"], WIDE, replace(WIDE, window=20)], ids=["sinks", "wide", "window"])
def test_the_kernel_for_other_devices_and_shapes(shape: AttentionShape, device: str) -> None:
    attention: Any = SimpleNamespace(attend=partial(attend_decode, shape=shape))
    case = make_case(shape, 16)
    if device == "cpu":  # the interpreter's products are not of bf16
        case = replace(case, q=case.q.float(), cache=case.cache.float())
    for splits in SPLITS:
        assert_close(case.run(attention, device, splits), case.expected)


def test_blocks_of_several_tiles(build: Any) -> None:
    attention, device = build(PLAIN, 64, VARIANTS[1])
    case = make_case(PLAIN, 64)
    assert_close(case.run(attention, device), case.expected)


def test_leaves_rows_that_do_not_decode(build: Any) -> None:
    """A step with prompts has rows behind those that decode."""
    attention, device = build(PLAIN, 16, VARIANTS[0])
    case = make_case(PLAIN, 16)
    case.expected[7:] = float("nan")
    assert_close(case.run(attention, device, max_rows=7), case.expected)


def test_a_row_is_what_it_is_wherever_it_stands(build: Any) -> None:
    attention, device = build(PLAIN, 16, VARIANTS[2])
    case = make_case(PLAIN, 16)
    order = torch.tensor([*reversed(range(len(POSITIONS))), *range(len(POSITIONS), len(POSITIONS) + PADDING)])
    turned = replace(case, q=case.q[order], table_rows=case.table_rows[order], positions=case.positions[order])
    assert torch.equal(turned.run(attention, device).nan_to_num(), case.run(attention, device)[order].nan_to_num())


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        (replace(PLAIN, head_dim=24), 16),
        (WIDE, 16),
        (replace(PLAIN, num_heads=32), 16),
        (PLAIN, 8),
    ],
    ids=["heads of 24", "heads of 512", "16 to a head", "blocks of 8"],
)
def test_refuses_what_it_does_not_serve(shape: AttentionShape, block_size: int) -> None:
    with pytest.raises(CudaUnavailable, match="blocks of"):
        attention_decode.source(shape, block_size, attention_decode.VARIANTS[-1])
