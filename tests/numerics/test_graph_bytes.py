"""What a layer counts for in the memory of CUDA graphs: by its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

runner = pytest.importorskip("manylora_worker.models.cuda.runner", reason="no Triton")


def layer(*, is_delta: bool = False, is_mixture: bool = False, has_input: bool = False) -> Any:
    mixer = mock.Mock(spec=runner.RecurrentMixer) if is_delta else SimpleNamespace()
    mlp = SimpleNamespace(shared=None) if is_mixture else mock.Mock(spec=runner.DenseMlp)
    return SimpleNamespace(mixer=mixer, mlp=mlp, input=SimpleNamespace() if has_input else None)


def test_a_delta_net_has_two_kernels_more_than_attention() -> None:
    for more in ({}, {"is_mixture": True}, {"has_input": True}):
        plain, delta = (runner._kernels_share(layer(is_delta=is_delta, **more)) for is_delta in (False, True))
        assert (delta - plain) * 8 == 2
    assert runner._kernels_share(layer()) == 1
