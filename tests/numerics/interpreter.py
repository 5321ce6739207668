"""Where a Triton kernel's test runs: in Triton's interpreter on the CPU or, marked gpu, compiled."""

from __future__ import annotations

import pytest
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1")
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")]),
]
