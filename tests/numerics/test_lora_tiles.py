"""lora_tiles.cu against plain torch: on a CPU through cuda_on_cpu.h and, marked gpu, compiled."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import lora_tiles  # noqa: E402
from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable  # noqa: E402
from manylora_worker.models.cuda.kernels.gate import Activation  # noqa: E402
from manylora_worker.models.cuda.kernels.lora import (  # noqa: E402
    LoraRows,
    a_field,
    b_field,
    low_rank_columns,
    num_chunks,
    part_field,
    part_word,
    shrink_splits,
    site_fields,
)
from manylora_worker.models.cuda.kernels.lora_tiles import SPLIT, LoraTiles, Sizes  # noqa: E402

from tests.numerics.cuda_on_cpu import cuda_on_cpu  # noqa: E402
from tests.numerics.reference_tiles import ReferenceTiles, activated  # noqa: E402

pytestmark = pytest.mark.kernels

CHUNKS = 4
RANKS = (0, 8, 16, 40, 64)
TILES = ((0, 3, 1), (3, 4, 2), (7, 2, 0), (9, 16, 3), (25, 11, 4), (36, 1, 2))
"""First row, rows, adapter; 37 rows of 40."""
ROWS = 40
TOLERANCE = 1e-2


@dataclass
class Case:
    """One site with adapters of RANKS, weights in an arena with gaps of NaN."""

    lora: LoraRows
    x: torch.Tensor
    widths: tuple[int, ...]
    a: dict[tuple[int, int], torch.Tensor]
    b: dict[tuple[int, int], torch.Tensor]

    def moved(self, device: str) -> LoraRows:
        lora = self.lora
        names = ("weights", "sites", "tiles", "row_adapters", "low_rank")
        return replace(lora, **{name: getattr(lora, name).to(device) for name in names})

    def expected_low_rank(self) -> torch.Tensor:
        """[rows, columns], NaN where nothing is to be written."""
        found = torch.full((ROWS, low_rank_columns(CHUNKS)), float("nan"))
        for first, count, adapter in TILES:
            for slot in range(len(self.widths)):
                start, rank = slot * CHUNKS * 16, RANKS[adapter]
                values = self.x[first : first + count].float() @ self.a[adapter, slot].float().T
                found[first : first + count, start : start + rank] = values
        return found

    def expected_outputs(self) -> torch.Tensor:
        """[rows, out] of the low-rank values that `lora` has, NaN where nothing is to be written."""
        found = torch.full((ROWS, sum(self.widths)), float("nan"))
        s = self.lora.low_rank.sum(0)
        for first, count, adapter in TILES:
            at = 0
            for slot, width in enumerate(self.widths):
                own = s[first : first + count, slot * CHUNKS * 16 :][:, : RANKS[adapter]].bfloat16().float()
                found[first : first + count, at : at + width] = own @ self.b[adapter, slot].float()
                at += width
        return found


def make_case(inputs: int, widths: tuple[int, ...]) -> Case:
    generator = torch.Generator().manual_seed(inputs + sum(widths))
    pieces: list[torch.Tensor] = []
    end = 0
    sites = torch.zeros(len(RANKS), site_fields(CHUNKS), dtype=torch.int64)
    whole: dict[str, dict[tuple[int, int], torch.Tensor]] = {"a": {}, "b": {}}
    for adapter, rank in enumerate(RANKS):
        for slot, width in enumerate(widths):
            sites[adapter, slot] = rank
            for name, field, columns in (("a", a_field, inputs), ("b", b_field, width)):
                for chunk in range(num_chunks(rank)):
                    sites[adapter, part_field(slot, chunk, CHUNKS)] = part_word(min(16, rank - 16 * chunk))
                matrix = (torch.randn(rank, columns, generator=generator) * columns**-0.5).bfloat16()
                whole[name][adapter, slot] = matrix
                for chunk in range(num_chunks(rank)):
                    sites[adapter, field(slot, chunk, CHUNKS)] = end
                    pieces += [matrix[chunk * 16 : chunk * 16 + 16].flatten(), torch.full((8,), float("nan"))]
                    end += pieces[-2].numel() + 8
    tiles = torch.zeros(ROWS, 4, dtype=torch.int32)
    tiles[: len(TILES), :3] = torch.tensor(TILES)
    tiles[0, 3] = len(TILES)
    splits = shrink_splits(inputs, ROWS)
    lora = LoraRows(
        weights=torch.cat(pieces).bfloat16(),
        sites=sites,
        tiles=tiles,
        num_tiles=ROWS,
        row_adapters=torch.zeros(ROWS, dtype=torch.int32),
        low_rank=torch.randn(splits, ROWS, low_rank_columns(CHUNKS), generator=generator),
        chunks=CHUNKS,
    )
    x = torch.randn(ROWS, inputs, generator=generator).bfloat16()
    return Case(lora, x, widths, whole["a"], whole["b"])


def gated(case: Case, product: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What gate is to make of a product of two halves."""
    return activated(product.float() + case.expected_outputs(), activation)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within bf16 where something was to be written, untouched (NaN) elsewhere."""
    result = result.cpu().float()
    assert torch.equal(result.isnan(), expected.isnan())
    error = (result - expected).nan_to_num().abs().max() / expected.nan_to_num().abs().max()
    assert error <= TOLERANCE


SHAPES = [(64, (64,)), (264, (72, 8, 1000)), (264, (1000, 520, 8, 8)), (2 * SPLIT + 72, (520, 520))]
"""Inputs and the slots' outputs: less than a warp's, no multiples of one, several programs'."""
SIZES = [Sizes(), Sizes(shrink_stages=3, expand_spans=1, expand_stages=1, gate_spans=1, gate_stages=3)]

RUN_ON_CPU = """
extern "C" void run_shrink(unsigned x, unsigned y, unsigned z, const u8* input, const u8* weights, const long* sites,
                           const Tile* tiles, float* low_rank, int a, int b, int c, int d) {
    kernel = [=] { lora_shrink(input, weights, sites, tiles, low_rank, a, b, c, d); };
    run_blocks({x, y, z}, 32 * SHRINK_WARPS);
}
extern "C" void run_expand(unsigned x, unsigned y, unsigned z, const float* low_rank, const u8* weights,
                           const long* sites, const Tile* tiles, u8* out, int a, int b, int c, int d, int e, int f,
                           int g, int h) {
    kernel = [=] { lora_expand(low_rank, weights, sites, tiles, out, a, b, c, d, e, f, g, h); };
    run_blocks({x, y, z}, 32 * EXPAND_WARPS);
}
extern "C" void run_gate(unsigned x, unsigned y, unsigned z, const u8* product, u8* out, const float* low_rank,
                         const u8* weights, const long* sites, const Tile* tiles, int a, int b, int c, int d,
                         int e, int f, int g, int h, int i) {
    kernel = [=] { lora_gate(product, out, low_rank, weights, sites, tiles, a, b, c, d, e, f, g, h, i); };
    run_blocks({x, y, z}, 32 * EXPAND_WARPS);
}
"""


class OnCpu(LoraTiles):
    """The source itself, with fibers for threads (cuda_on_cpu.h): every index, wait and barrier of it."""

    def __init__(self, sizes: Sizes, programs: int, folder: Path) -> None:
        self._sizes, self._programs = sizes, programs
        self._library = cuda_on_cpu(lora_tiles.source(CHUNKS, sizes) + RUN_ON_CPU, folder)
        self._kernels = {name: self._runner(name) for name in ("lora_shrink", "lora_expand", "lora_gate")}
        self._bytes = dict.fromkeys(self._kernels, 0)

    def _runner(self, name: str) -> Any:
        run = getattr(self._library, name.replace("lora_", "run_"))

        class Kernel:
            def launch(self, grid: tuple[int, int, int], *sizes: Any, pdl: bool) -> None:
                arguments = sizes[-1]
                values = [a if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in arguments]
                run(*grid, *values)

        return Kernel()


@pytest.fixture(scope="module", params=[0, 1], ids=["sizes", "other sizes"])
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoraTiles:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    # Fewer programs than items: one takes several.
    return OnCpu(SIZES[request.param], 12, tmp_path_factory.mktemp("lora_tiles"))


@pytest.mark.parametrize(("inputs", "widths"), SHAPES, ids=str)
def test_shrink_and_expand_on_a_cpu(on_cpu: LoraTiles, inputs: int, widths: tuple[int, ...]) -> None:
    check_shrink_and_expand(on_cpu, make_case(inputs, widths), "cpu")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [8, 584])
def test_gate_on_a_cpu(on_cpu: LoraTiles, width: int, activation: Activation) -> None:
    check_gate(on_cpu, width, activation, "cpu")


def test_the_reference() -> None:
    check_shrink_and_expand(ReferenceTiles(), make_case(264, (72, 8, 1000)), "cpu")
    check_gate(ReferenceTiles(), 584, "silu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=["sizes", "other sizes"])
def test_on_a_gpu(sizes: Sizes) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    tiles = LoraTiles(CHUNKS, torch.device("cuda"), sizes)
    for inputs, widths in (*SHAPES, (4096, (4096, 1024, 1024)), (14336, (4096,))):
        check_shrink_and_expand(tiles, make_case(inputs, widths), "cuda")
    for width in (8, 584, 14336):
        check_gate(tiles, width, "silu", "cuda")
        check_gate(tiles, width, "gelu_tanh", "cuda")


def check_shrink_and_expand(tiles: LoraTiles, case: Case, device: str) -> None:
    lora = case.moved(device)
    out = torch.full((ROWS, sum(case.widths)), float("nan"), dtype=torch.bfloat16, device=device)
    tiles.expand(lora, out, widths=case.widths, pdl=False)
    assert_close(out, case.expected_outputs())
    lora.low_rank.fill_(float("nan"))
    tiles.shrink(case.x.to(device), lora, num_slots=len(case.widths), pdl=False)
    assert_close(lora.low_rank.sum(0), case.expected_low_rank())


def check_gate(tiles: LoraTiles, width: int, activation: Activation, device: str) -> None:
    for widths in ((width, width), (2 * width,)):  # of two layers, or of one that is both
        case = make_case(64, widths)
        product = torch.randn(ROWS, 2 * width, generator=torch.Generator().manual_seed(width)).bfloat16()
        out = torch.full((ROWS, width), float("nan"), dtype=torch.bfloat16, device=device)
        lora = case.moved(device)
        tiles.gate(product.to(device)[None], out, activation=activation, lora=lora, num_slots=len(widths), pdl=False)
        assert_close(out, gated(case, product, activation))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_place() -> None:
    """The same rows and adapters in tiles of other sizes, in another order: the same bits."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    tiles = LoraTiles(CHUNKS, torch.device("cuda"))
    case = make_case(4096, (4096, 1024, 1024))
    x = case.x[:1].repeat(ROWS, 1).cuda()
    found = []
    for runs in (((0, 16, 3), (16, 9, 3), (25, 15, 3)), ((0, 1, 3), (1, 16, 3), (17, 7, 3), (24, 16, 3))):
        lora = case.moved("cuda")
        lora.tiles[: len(runs), :3] = torch.tensor(runs)
        lora.tiles[0, 3] = len(runs)
        out = torch.empty(ROWS, 6144, dtype=torch.bfloat16, device="cuda")
        tiles.shrink(x, lora, num_slots=3, pdl=True)
        tiles.expand(lora, out, widths=case.widths, pdl=True)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[0][:1].expand(ROWS, -1))


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def unavailable(self: LoraTiles, chunks: int, device: torch.device) -> None:
        raise CudaUnavailable("libnvrtc.so.13 is not installed")

    monkeypatch.setattr(LoraTiles, "__init__", unavailable)
    assert LoraTiles.where_it_runs(CHUNKS, torch.bfloat16, torch.device("cuda")) is None
    assert "libnvrtc.so.13 is not installed" in caplog.text
    caplog.clear()
    assert LoraTiles.where_it_runs(CHUNKS, torch.float32, torch.device("cuda")) is None
    assert LoraTiles.where_it_runs(CHUNKS, torch.bfloat16, torch.device("cpu")) is None
    assert not caplog.text
