"""The kernels' exponential and logarithm, within units in the last place."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

import triton.language as tl  # noqa: E402
from manylora_worker.models.cuda.kernels import sampling_maths  # noqa: E402

from tests.numerics.interpreter import DEVICES  # noqa: E402

pytestmark = pytest.mark.kernels


@triton.jit
def _functions_kernel(x_ptr, exp_ptr, log_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(exp_ptr + at, sampling_maths.exp(-x * 90.0))
    tl.store(log_ptr + at, sampling_maths.minus_log1p_of_minus(x))


def functions(x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' e^(-90 x) and -log(1 - x)."""
    x = x.to(device)
    exps, logs = torch.empty_like(x), torch.empty_like(x)
    _functions_kernel[(len(x) // 1024,)](x, exps, logs, SIZE=1024)
    return exps.cpu(), logs.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_exp_and_log1p_are_within_ulps(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(4096, generator=generator), torch.rand(4096, generator=generator) ** 8])
    x = torch.cat([x, 1 - x * 0.01, x * 1e-6]).clamp_(2.0**-32, 1 - 2.0**-24)
    exps, logs = functions(x, device)
    expected = (-x * 90.0).double().exp()
    assert ((exps.double() - expected).abs() / expected)[expected > 2e-38].max() < 2e-7
    expected = -torch.log1p(-x.double())
    assert ((logs.double() - expected).abs() / expected).max() < 3e-7
