"""Where a Triton kernel's test runs: in Triton's interpreter on the CPU or, marked gpu, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

INTERPRETED = bool(knobs.runtime.interpret)
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1")
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")]),
]


_create_dot = InterpreterBuilder.create_dot


def _exact_dot(builder: InterpreterBuilder, a: Any, b: Any, d: TensorHandle, *settings: Any) -> TensorHandle:
    """The interpreter's dot, summed in float64. A device sums every row of a tile in one order; which one numpy's BLAS
    takes depends on where the row stands on some processors (AVX-512), and a test of that would fail there."""
    if not np.issubdtype(d.data.dtype, np.floating):
        return _create_dot(builder, a, b, d, *settings)
    wide = _create_dot(builder, a, b, TensorHandle(d.data.astype(np.float64), tl.float64), *settings)
    return TensorHandle(wide.data.astype(d.data.dtype), d.dtype.scalar)


InterpreterBuilder.create_dot = _exact_dot


_convert_float = interpreter._convert_float


def _exact_convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """To codes of e4m3 as a device and torch round. The interpreter's own carries nothing into the exponent, and knows
    no NaN."""
    if target != tl.float8e4nv or source != tl.float32:
        return _convert_float(data, source, target, rounding_mode)
    return torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = _exact_convert
