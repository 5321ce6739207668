"""A step's metadata: packed on the host, read in place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.steps.step_tables import StepTables

CPU = torch.device("cpu")


def test_fields_lie_side_by_side_and_keep_their_addresses() -> None:
    tables = StepTables({"a": 3, "b": 2}, CPU)
    first, second = tables.on_device("a"), tables.on_device("b")
    for step in range(6):  # more often than there are buffers
        host = tables.begin()
        host["a"][:] = [step, step + 1, step + 2]
        host["b"][:] = -step
        tables.upload()
        assert first.tolist() == [step, step + 1, step + 2]
        assert second.tolist() == [-step, -step]
    assert tables.on_device("a").data_ptr() == first.data_ptr()


def test_what_is_filled_for_the_next_step_does_not_show_before_it_is_uploaded() -> None:
    tables = StepTables({"a": 1}, CPU)
    tables.begin()["a"][:] = 5
    tables.upload()
    tables.begin()["a"][:] = 9
    assert tables.on_device("a").item() == 5


def test_blanked_is_for_a_while() -> None:
    tables = StepTables({"a": 2, "b": 2}, CPU)
    host = tables.begin()
    host["a"][:], host["b"][:] = 7, 8
    tables.upload()
    with tables.blanked({"b": 3}):
        assert (tables.on_device("a").tolist(), tables.on_device("b").tolist()) == ([0, 0], [3, 3])
    assert (tables.on_device("a").tolist(), tables.on_device("b").tolist()) == ([7, 7], [8, 8])
