"""A product that a rank has a share of: made whole there, and the whole decoder on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics.conftest import FamilyOf

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.kernels.combine import combine

from tests.numerics.interpreter import DEVICES, needs_interpreter
from tests.numerics.rank_program import other_rank, run

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("parts", "columns"), [(1, 64), (3, 1100)])
def test_parts_are_added_up_for_the_rows_that_are_there(device: str, parts: int, columns: int) -> None:
    product = torch.randn(parts, 5, columns, device=device)
    out = torch.full((5, columns), 7.0, device=device)
    combine(product, out, num_rows=torch.tensor(4, dtype=torch.int32, device=device), lora=None, pdl=False)
    torch.testing.assert_close(out[:4], product.sum(0)[:4])
    assert bool((out[4] == 7.0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_is_added_behind_its_rows_gates(device: str) -> None:
    product, gates = torch.randn(2, 5, 72, device=device), torch.randn(5, 1, device=device)
    before = torch.randn(5, 72, device=device)
    out, num_rows = before.clone(), torch.tensor(4, dtype=torch.int32, device=device)
    combine(product, out, num_rows=num_rows, lora=None, adds=True, gates=gates, pdl=False)
    expected = before + gates.sigmoid() * product.sum(0)
    torch.testing.assert_close(out[:4], expected[:4], atol=1e-5, rtol=1e-4)
    assert torch.equal(out[4], before[4])
    combine(product, out, num_rows=num_rows, lora=None, adds=True, pdl=False)
    torch.testing.assert_close(out[:4], (expected + product.sum(0))[:4], atol=1e-5, rtol=1e-4)
    assert torch.equal(out[4], before[4])


def check_two_ranks(family_of: FamilyOf, name: str, device: str, folder: Path) -> None:
    family = family_of(name)
    names = ["patterns", "all-linear"]
    adapters = [family.adapters[name] for name in names]
    with other_rank(folder / "store", device, family.folder, adapters):
        for streams, logits in run(0, folder / "store", device, family.folder, adapters):
            for stream, row, adapter in zip(streams, logits, [*names, None, None], strict=True):
                expected = family.reference.logits(stream.tokens, adapter)[-1]
                torch.testing.assert_close(row.cpu(), expected, atol=1e-3, rtol=0)


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_5_wide",
        *(
            pytest.param(each, marks=pytest.mark.wide)
            for each in ("gemma3_text", "gemma4_text", "gemma4_shared", "granite4_h_wide")
        ),
    ],
)
def test_two_ranks_in_the_interpreter(
    family_of: FamilyOf, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora_worker.models.loader.can_pack", lambda *_: False)
    check_two_ranks(family_of, name, "cpu", tmp_path)
