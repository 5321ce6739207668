"""Which CUDA kernel of 4-bit codes takes how many rows, and what serves where there is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4_lookup
from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable
from manylora_worker.models.cuda.kernels.nf4_hopper import HopperProducts
from manylora_worker.models.cuda.kernels.nf4_rows import Nf4Rows
from manylora_worker.models.cuda.kernels.nf4_tiles import Nf4Tiles

pytestmark = pytest.mark.kernels


class _Named:
    def __init__(self, kernel: type[Nf4Rows | Nf4Tiles]) -> None:
        self.takes, self._name = kernel.takes, kernel.__name__

    def product(self, *_: object, **__: object) -> str:
        return self._name


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "kernel"),
    [
        (1, 256, 16, Nf4Rows), (16, 256, 16, Nf4Rows), (17, 256, 16, Nf4Tiles), (128, 256, 16, Nf4Tiles),
        (129, 256, 16, None), (8, 256, 24, Nf4Tiles), (1, 192, 16, None), (64, 192, 16, None),
    ],
)  # fmt: skip
def test_the_rows_choose_the_kernel(rows: int, inputs: int, outputs: int, kernel: type | None) -> None:
    products = object.__new__(HopperProducts)
    products._rows, products._tiles = _Named(Nf4Rows), _Named(Nf4Tiles)  # type: ignore[assignment]
    assert products.takes(rows, inputs, outputs) == (kernel is not None)
    if kernel is not None:
        x, absmax = torch.zeros(rows, inputs), torch.zeros(outputs, inputs // 64)
        assert products.product(x, absmax, absmax, None, pdl=False) == kernel.__name__  # type: ignore[comparison-overlap]


def test_a_gpu_after_hopper_has_the_kernel_of_few_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nf4Rows, "__init__", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    products = HopperProducts(nf4_lookup.PAIR_BITS, torch.device("cuda"))
    assert products.takes(16, 256, 16)
    assert not products.takes(17, 256, 16)


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_rows(self: Nf4Rows, values: object, device: torch.device) -> None:
        raise CudaUnavailable("libnvrtc.so.13 is not installed")

    monkeypatch.setattr(Nf4Rows, "__init__", no_rows)
    assert HopperProducts.where_they_run(nf4_lookup.PAIR_BITS, torch.device("cuda")) is None
    assert "libnvrtc.so.13 is not installed" in caplog.text
    assert HopperProducts.where_they_run(nf4_lookup.PAIR_BITS, torch.device("cpu")) is None
