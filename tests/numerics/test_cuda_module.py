"""What becomes of a CUDA source that cannot be compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import cuda_module
from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable

pytestmark = pytest.mark.kernels


def test_a_build_without_cuda_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CudaUnavailable, match="without CUDA"):
        cuda_module.compile_cubin("", "nothing", "sm_90")


@pytest.mark.gpu
def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(CudaUnavailable, match="undefined_name"):
        cuda_module.compile_cubin('extern "C" __global__ void f() { undefined_name(); }', "f", "sm_90")
