"""What FP8 cuts off is told, once for each look, and nothing where nothing is."""

from __future__ import annotations

import logging

import pytest
import torch
from manylora_worker.models.layers import kv_cuts
from manylora_worker.models.layers.kv_cuts import KvCuts

from tests.numerics.conftest import KV_IN_FP8, FamilyOf
from tests.numerics.driver import Driver, Stream, make_runner


def test_new_ones_are_told_at_the_next_look(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kv_cuts, "_STEPS", 2)
    cuts = KvCuts(torch.device("cpu"))
    for added, told in ((0, ""), (7, ""), (0, "7 elements of keys and values"), (0, ""), (2, ""), (0, "2 elements")):
        caplog.clear()
        cuts.count += added
        for _ in range(2):
            cuts.after_step()
        assert told in caplog.text
        assert bool(caplog.text) == bool(told)
    assert "9 in all" in caplog.text


def test_the_rest_is_told_at_the_end(family_of: FamilyOf, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runner = make_runner(family_of("llama" + KV_IN_FP8).loaded)
    runner._cache._scales = ((1e-3, 1e-3),) * 3
    Driver(runner).run([Stream([5, 6, 7, 8])], 3)
    assert caplog.text == "", "there was no look yet"
    for _ in range(2):
        runner.close()
    assert caplog.text.count("are cut off at the largest code") == 1


def test_an_engine_tells_them(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales that are too small for this model."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(kv_cuts, "_STEPS", 1)
    loaded = family_of("llama" + KV_IN_FP8).loaded
    runner = make_runner(loaded)
    Driver(runner).run([Stream([5, 6, 7, 8])], 3)
    assert caplog.text == ""
    runner._cache._scales = ((1e-3, 1e-3),) * 3
    Driver(runner).run([Stream([5, 6, 7, 8])], 3)
    assert "are cut off at the largest code" in caplog.text
