from __future__ import annotations

import gc

import pytest
from manylora_shared.heap import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_after_a_pause(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), collector_paused():
            _ = 1 // 0
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
