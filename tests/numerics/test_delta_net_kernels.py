"""The kernels of a gated delta net against torch: the rule token by token, the window, the norm; a state's place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from manylora_worker.models.layers.delta_net import _one_token
from manylora_worker.models.layers.recurrent import RecurrentShape
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.kernels import delta_net
from manylora_worker.models.cuda.kernels.delta_net import StateLayout, convolve, delta_rule, gated_norm

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels

SHAPES = {
    "odd": RecurrentShape(key_heads=2, value_heads=4, key_dim=8, value_dim=10, window=3),
    "even": RecurrentShape(key_heads=1, value_heads=2, key_dim=16, value_dim=16, window=2),
}
LAYER, LAYERS = 1, 3
COUNTS = [1, 6, 1, 2, 0]  # rows of each sequence, an unused entry behind them
STARTS = [7, 0, 0, 4, 0]


class Case:
    """Sequences of one step, each with a table of blocks that are scattered over an arena of noise."""

    def __init__(self, shape: RecurrentShape, block: int, device: str) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.rows = sum(COUNTS)
        self.columns = shape.channels + shape.values + 2 * shape.value_heads
        self.matrix_elements = shape.value_heads * shape.key_dim * shape.value_dim
        self.layer_elements = self.matrix_elements + shape.channels * shape.window
        blocks_each = -(-LAYERS * self.layer_elements // block)
        num_blocks = len(COUNTS) * blocks_each
        arena = torch.randn(num_blocks, block) * 0.5
        self.table = torch.randperm(num_blocks).view(len(COUNTS), blocks_each).int()
        self.layout = StateLayout(arena.to(device).view(-1), block, self.layer_elements)
        self.product = torch.randn(self.rows + 2, self.columns, device=device)
        self.weight = torch.randn(shape.channels, 1, shape.window + 1)
        self.decay, self.decay_bias = torch.randn(shape.value_heads), torch.randn(shape.value_heads)
        ends = torch.tensor(COUNTS).cumsum(0).tolist()
        firsts = [end - count for end, count in zip(ends, COUNTS, strict=True)]
        self.spans = list(zip(firsts, ends, strict=True))
        entries = zip(firsts, COUNTS, STARTS, range(len(COUNTS)), strict=True)
        self.sequences = torch.tensor([list(entry) for entry in entries], dtype=torch.int32, device=device)
        pairs = [(i, k) for i, count in enumerate(COUNTS) for k in range(count)]
        self.table_rows = self._ints([i for i, _ in pairs])
        self.offsets = self._ints([k for _, k in pairs])
        self.positions = self._ints([STARTS[i] + k for i, k in pairs])
        self.num_rows = torch.tensor(self.rows, dtype=torch.int32, device=device)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor([*values, 0, 0], dtype=torch.int32, device=self.device)

    def state(self, sequence: int, layer: int = LAYER) -> tuple[Tensor, Tensor]:
        """Copies of the matrices and the window."""
        by_block = self.layout.blocks.view(-1, self.layout.block_elements).cpu()
        row = by_block[self.table[sequence].long()].view(-1)
        own = row[layer * self.layer_elements : (layer + 1) * self.layer_elements]
        shape = self.shape
        matrices = own[: self.matrix_elements].view(shape.value_heads, shape.key_dim, shape.value_dim)
        return matrices.clone(), own[self.matrix_elements :].view(shape.channels, shape.window).clone()

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        shape, rows, device = self.shape, self.rows + 2, self.device
        convolved = torch.full((rows, shape.channels), 7.0, device=device)
        gates = torch.full((rows, shape.value_heads, 2), 7.0, device=device)
        out = torch.full((rows, shape.values), 7.0, device=device)
        tables = self.table.to(device)
        weight, decay, decay_bias = (each.to(device) for each in (self.weight, self.decay, self.decay_bias))
        convolve(
            self.product, convolved, gates, weight=weight, bias=None, decay=decay, decay_bias=decay_bias, shape=shape,
            states=self.layout, layer=LAYER, tables=tables, table_rows=self.table_rows, positions=self.positions,
            offsets=self.offsets, num_rows=self.num_rows, pdl=False,
        )  # fmt: skip
        delta_rule(
            convolved, gates, self.product, out, shape=shape, states=self.layout, layer=LAYER, tables=tables,
            sequences=self.sequences, num_sequences=len(COUNTS), pdl=False,
        )  # fmt: skip
        return convolved.cpu(), gates.cpu(), out.cpu()

    def expected(self, sequence: int) -> tuple[Tensor, ...]:
        """query, key, value, decay, beta, as the rules take them, and the window behind them."""
        shape = self.shape
        first, last = self.spans[sequence]
        product = self.product[first:last].cpu()
        mixed = product[:, : shape.channels].T
        window = self.state(sequence)[1] if STARTS[sequence] else torch.zeros(shape.channels, shape.window)
        seen = torch.cat((window, mixed), 1)
        found = F.silu(F.conv1d(seen[None], self.weight, groups=shape.channels))[0].T
        keys = shape.key_heads * shape.key_dim
        query, key, value = found.split_with_sizes((keys, keys, shape.values), 1)
        repeats = shape.value_heads // shape.key_heads
        query, key = (x.unflatten(1, (-1, shape.key_dim)).repeat_interleave(repeats, 1) for x in (query, key))
        beta, step = product[:, -2 * shape.value_heads :].chunk(2, 1)
        decay = -self.decay.exp() * F.softplus(step + self.decay_bias)
        return query, key, value.unflatten(1, (-1, shape.value_dim)), decay, beta.sigmoid(), seen[:, -shape.window :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize(("shape", "block"), [("odd", 37), ("odd", 300), ("even", 64), ("even", 48)])
def test_each_sequence_is_computed_as_alone(
    shape: str, block: int, many: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, chunks that begin and that go on; every place that is no state of theirs stays as it was."""
    monkeypatch.setattr(delta_net, "_MANY_PROGRAMS", 0 if many else 1 << 30)
    case = Case(SHAPES[shape], block, device)
    before = [case.state(i) for i in range(len(COUNTS))]
    others = [case.state(i, layer) for i in range(len(COUNTS)) for layer in (0, 2)]
    expected = {i: case.expected(i) for i, count in enumerate(COUNTS) if count}
    _, _, out = case.run()
    for i, count in enumerate(COUNTS):
        matrices, window = case.state(i)
        if not count:
            assert torch.equal(matrices, before[i][0])
            assert torch.equal(window, before[i][1])
            continue
        query, key, value, decay, beta, last_window = expected[i]
        begun = before[i][0] if STARTS[i] else torch.zeros_like(before[i][0])
        stepped, rows = begun.clone()[None], []
        for k in range(count):
            inputs = (x[k : k + 1] for x in (query, key, value, decay, beta))
            rows.append(_one_token(stepped, *inputs)[0])
        found = out[slice(*case.spans[i])].unflatten(1, (-1, case.shape.value_dim))
        torch.testing.assert_close(found, torch.stack(rows), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(matrices, stepped[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(window, last_window, atol=1e-6, rtol=0)
        chunked, state = torch_chunk_gated_delta_rule(
            *(x[None] for x in (query, key, value)), g=decay[None], beta=beta[None], chunk_size=max(2, count),
            initial_state=begun[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(found, chunked[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(matrices, state[0], atol=1e-4, rtol=1e-4)
    still = [case.state(i, layer) for i in range(len(COUNTS)) for layer in (0, 2)]
    assert all(torch.equal(a, b) for one, two in zip(others, still, strict=True) for a, b in zip(one, two, strict=True))
    assert bool((out[case.rows :] == 7.0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_are_left_alone(device: str) -> None:
    case = Case(SHAPES["odd"], 37, device)
    convolved, gates, _ = case.run()
    assert bool((convolved[case.rows :] == 7.0).all() & (gates[case.rows :] == 7.0).all())
    assert not (convolved[: case.rows] == 7.0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_gated_norm(device: str) -> None:
    case = Case(SHAPES["odd"], 37, device)
    shape = case.shape
    x, weight = torch.randn(case.rows + 2, shape.values, device=device), torch.randn(shape.value_dim, device=device)
    out = torch.full_like(x, 7.0)
    gated_norm(x, case.product, out, weight=weight, eps=1e-5, shape=shape, num_rows=case.num_rows, pdl=False)
    gate = case.product[:, shape.channels : shape.channels + shape.values]
    by_head = F.rms_norm(x.unflatten(1, (-1, shape.value_dim)), (shape.value_dim,), weight, 1e-5)
    expected = (by_head.flatten(1) * F.silu(gate))[: case.rows]
    torch.testing.assert_close(out[: case.rows], expected, atol=1e-5, rtol=1e-4)
    assert bool((out[case.rows :] == 7.0).all())
