"""How a step's adapters are computed: every row gets its own adapter's product, and stacks pay for themselves."""

from __future__ import annotations

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.models.layers.lora_linear import (
    CombinedLora,
    LoraBatch,
    LoraCosts,
    LoraPlanner,
    Segment,
    SegmentedLora,
    StackedLora,
)
from manylora_worker.weights.sites import DeviceAdapter, Site, SiteWeights, Slot, SlotWeights

CPU = torch.device("cpu")
SITE = Site(0, 6, (Slot("q", 0, 5), Slot("k", 5, 9)))
OTHER_SITE = Site(1, 6, (Slot("o", 0, 4),))


def adapter(name: str, ranks: tuple[int, int] = (2, 3)) -> DeviceAdapter:
    torch.manual_seed(hash(name) % 1000)
    first, second = ranks
    weights = SiteWeights(
        torch.randn(first + second, 6).t(),
        (
            SlotWeights(0, 0, first, torch.randn(first, 5)),
            SlotWeights(1, first, first + second, torch.randn(second, 4)),
        ),
    )
    return DeviceAdapter(AdapterUid(name), {0: weights}, size_bytes=1)


def segments(counts: list[tuple[DeviceAdapter | None, int]]) -> tuple[list[Segment], int]:
    found, row = [], 0
    for one, count in counts:
        if one is not None:
            found.append(Segment(row, row + count, one))
        row += count
    return found, row


def expected(found: list[Segment], inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    result = outputs.clone()
    for segment in found:
        weights = segment.adapter.sites[0]
        for row in range(segment.first_row, segment.last_row):
            for part in weights.slots:
                slot = SITE.slots[part.slot]
                product = inputs[row] @ weights.a_t[:, part.start : part.stop] @ part.b
                result[row, slot.start : slot.stop] += product
    return result


def planner(product: float = 1e9, copied_weight: float = 0.0, limit: int = 10_000) -> LoraPlanner:
    return LoraPlanner(LoraCosts(product, copied_weight), max_stacked_weights=limit)


A, B, C, D = (adapter(name) for name in "abcd")
ODD = adapter("odd", (1, 4))


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([(A, 1), (B, 1), (C, 1)], StackedLora),
        ([(A, 2), (B, 2)], StackedLora),
        ([(None, 2), (A, 2), (B, 2), (None, 1)], StackedLora),
        ([(A, 3), (B, 1), (C, 2)], StackedLora),
        ([(None, 1), (A, 3), (ODD, 2), (B, 1), (C, 1)], CombinedLora),
        ([(A, 1), (ODD, 1), (B, 1), (C, 1), (None, 2)], CombinedLora),
        ([(A, 1), (B, 1), (ODD, 1), (None, 2)], CombinedLora),
        ([(A, 1), (ODD, 1), (B, 1)], SegmentedLora),  # selecting rows costs what the stack saves
        ([(A, 2), (B, 1)], SegmentedLora),
        ([(A, 4)], SegmentedLora),
        ([(A, 1), (ODD, 2)], SegmentedLora),
    ],
)
def test_every_row_gets_its_own_adapter(counts: list[tuple[DeviceAdapter | None, int]], kind: type[LoraBatch]) -> None:
    found, num_rows = segments(counts)
    inputs, outputs = torch.randn(num_rows, 6), torch.randn(num_rows, 9)
    wanted = expected(found, inputs, outputs)
    stacked = planner().plan(found, num_rows, CPU)
    assert type(stacked) is kind
    apart = planner(product=0.0).plan(found, num_rows, CPU)
    assert type(apart) is SegmentedLora
    for batch in (stacked, apart):
        result = outputs.clone()
        batch.add(SITE, inputs, result)
        torch.testing.assert_close(result, wanted)
        untouched = torch.randn(num_rows, 4)
        before = untouched.clone()
        batch.add(OTHER_SITE, inputs, untouched)
        assert torch.equal(untouched, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("product", [0.0, 1e9])
def test_a_row_that_is_not_finite_stays_alone(value: float, product: float) -> None:
    found, num_rows = segments([(None, 1), (A, 3), (B, 1), (C, 1), (ODD, 1)])
    inputs, outputs = torch.randn(num_rows, 6), torch.zeros(num_rows, 9)
    batch = planner(product=product).plan(found, num_rows, CPU)
    assert type(batch) is (CombinedLora if product else SegmentedLora)
    clean = outputs.clone()
    batch.add(SITE, inputs, clean)
    inputs[1] = value
    batch.add(SITE, inputs, outputs)
    assert not outputs[1].isfinite().any()
    assert torch.equal(outputs[[0, *range(2, 7)]], clean[[0, *range(2, 7)]])


def test_no_adapters_no_batch() -> None:
    assert planner().plan([], 3, CPU) is None


def test_a_set_is_stacked_once_it_has_lost_as_much_as_the_copy_costs() -> None:
    found, num_rows = segments([(A, 1), (B, 1)])
    gain = A.num_sites * 10.0  # a product a site and slot is saved, and an addition a slot is not
    costly = planner(product=10.0, copied_weight=2.5 * gain / (2 * A.num_weights))
    kinds = [type(costly.plan(found, num_rows, CPU)) for _ in range(4)]
    assert kinds == [SegmentedLora, SegmentedLora, StackedLora, StackedLora]
    others, other_rows = segments([(C, 1), (D, 1)])
    for _ in range(2):  # sets that alternate never stay long enough
        assert type(costly.plan(others, other_rows, CPU)) is SegmentedLora
        assert type(costly.plan(found, num_rows, CPU)) is StackedLora


def test_stacks_are_bounded_and_forgotten() -> None:
    bounded = planner(limit=2 * A.num_weights)
    pair, num_rows = segments([(A, 1), (B, 1)])
    three, three_rows = segments([(A, 1), (B, 1), (C, 1)])
    assert type(bounded.plan(three, three_rows, CPU)) is SegmentedLora
    assert type(bounded.plan(pair, num_rows, CPU)) is StackedLora
    other, _ = segments([(C, 1), (D, 1)])
    assert type(bounded.plan(other, num_rows, CPU)) is StackedLora
    assert list(bounded._stacks) == [("c", "d")]
    bounded.forget(D.uid)
    assert not bounded._stacks


def test_long_ragged_segments_are_not_padded() -> None:
    """Repeating rows must not cost more than the products that it saves."""
    found, num_rows = segments([(A, 100), (B, 1)])
    assert type(planner(product=100.0).plan(found, num_rows, CPU)) is SegmentedLora
