from __future__ import annotations

import pytest
import torch
from manylora_worker.models.ranks.own_rows import cut_outputs, own_rows
from torch import nn

OWN = (range(1, 3), range(5, 6))


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_keeps_the_outputs_that_are_a_ranks(has_bias: bool) -> None:
    linear = nn.Linear(4, 6, bias=has_bias)
    x = torch.randn(2, 4)
    whole = linear(x)
    cut_outputs(linear, OWN)
    torch.testing.assert_close(linear(x), whole[:, [1, 2, 5]])
    assert linear.out_features == 3
    assert not linear.weight.requires_grad


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_convolution_keeps_its_channels(has_bias: bool) -> None:
    convolution = nn.Conv1d(6, 6, 3, groups=6, bias=has_bias)
    x = torch.randn(1, 6, 8)
    whole = convolution(x)
    cut_outputs(convolution, OWN)
    torch.testing.assert_close(convolution(x[:, [1, 2, 5]]), whole[:, [1, 2, 5]])


def test_rows_of_another_dimension_and_of_no_memory() -> None:
    x = torch.arange(12).view(2, 6)
    assert own_rows(x, OWN, 1).tolist() == [[1, 2, 5], [7, 8, 11]]
    with torch.device("meta"):
        linear = nn.Linear(4, 6)
    cut_outputs(linear, OWN)
    assert (linear.weight.shape, linear.weight.is_meta) == ((3, 4), True)
