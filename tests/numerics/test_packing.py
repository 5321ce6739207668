"""How a weight file becomes an adapter's buffer."""

from __future__ import annotations

import pytest
import torch
from manylora_shared.ids import AdapterUid, TenantId
from manylora_worker.weights import packing as packing_module
from manylora_worker.weights.packing import ModuleWeights, Packing, Scratch, StoredMatrix, kind_of
from manylora_worker.weights.sites import Site, Slot

SITES = [Site(0, 4, (Slot("q", 0, 3), Slot("k", 3, 5)))]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "at an odd byte"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.3])
def test_a_is_stacked_and_b_transposed_and_scaled(scale: float, stored: torch.dtype, offset: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 3), "k": (1, 2)}  # rank, outputs
    content, modules = torch.zeros(offset, dtype=torch.uint8), {}
    expected_a, expected_b = [], []
    for path, (rank, outputs) in shapes.items():
        a, b = (torch.randn(s, generator=generator).to(stored) for s in ((rank, 4), (outputs, rank)))
        places = []
        for matrix in (a, b):
            places.append(StoredMatrix(stored, *matrix.shape, first_byte=content.numel()))
            content = torch.cat([content, matrix.contiguous().view(torch.uint8).flatten()])
        modules[path] = ModuleWeights(places[0], places[1], scale)
        expected_a.append(a.bfloat16())
        expected_b.append((b.float() * scale).bfloat16().t())
    found = Packing.of({}, modules, SITES, torch.bfloat16)
    adapter = found.pack(content, AdapterUid("u"), lambda count, dtype: torch.empty(count, dtype=dtype))
    (site,) = adapter.on(torch.device("cpu")).sites.values()
    assert torch.equal(site.a_t.t(), torch.cat(expected_a))
    for slot, b in zip(site.slots, expected_b, strict=True):
        assert torch.equal(slot.b, b)


def test_a_kind_is_configuration_header_and_size_of_one_owner() -> None:
    acme, bolt = TenantId("acme"), TenantId("bolt")
    kinds = [kind_of(owner, b"config", b"header", 5) for owner in (acme, bolt, None)]
    others = [(b"config", b"header", 6), (b"config", b"headers", 5), (b"configh", b"eader", 5), (b"", b"", 5)]
    assert kinds[0] == kind_of(acme, b"config", b"header", 5)
    assert len({*kinds, *(kind_of(acme, *each) for each in others)}) == 7


def test_memory_is_given_out_again_but_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_KEPT_SCRATCH_BYTES", 100)
    scratch = Scratch()
    first = scratch.take(80)
    assert scratch.take(50).data_ptr() == first.data_ptr()
    assert scratch.take(500).numel() == 500
    assert scratch.take(80).data_ptr() == first.data_ptr()


def test_the_kinds_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_KEPT_PACKINGS", 2)
    scratch = Scratch()
    packings = [Packing({"r": i}, (), torch.float32, ()) for i in range(3)]
    scratch.keep(b"0", packings[0])
    scratch.keep(b"1", packings[1])
    assert scratch.packing(b"0") is packings[0]
    scratch.keep(b"2", packings[2])
    assert [scratch.packing(kind) for kind in (b"0", b"1", b"2")] == [packings[0], None, packings[2]]


def test_few_kinds_with_very_many_matrices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adapters of experts have: each would take megabytes."""
    monkeypatch.setattr(packing_module, "_KEPT_COPIES", 5)
    scratch = Scratch()
    packings = [Packing({}, (), torch.float32, [_copy()] * count) for count in (2, 3, 3, 9)]
    for i, packing in enumerate(packings[:2]):
        scratch.keep(b"%d" % i, packing)
        scratch.keep(b"%d" % i, packing)
    assert scratch.packing(b"0") is packings[0]
    scratch.keep(b"2", packings[2])
    assert [scratch.packing(kind) for kind in (b"0", b"1", b"2")] == [packings[0], None, packings[2]]
    scratch.keep(b"3", packings[3])
    assert [scratch.packing(kind) for kind in (b"0", b"2", b"3")] == [None, None, packings[3]]


def _copy() -> packing_module._Copy:
    return packing_module._Copy(torch.float32, (1, 1), (1, 1), 0, 0, 1, 1.0, True)
