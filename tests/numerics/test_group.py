from __future__ import annotations

import pytest
import torch
from manylora_worker.models.ranks.group import _reach_one_another


@pytest.mark.parametrize("apart", [None, (5, 4)])
def test_gpus_that_read_one_anothers_memory(
    apart: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pair is asked, both ways, whichever rank asks; the first one says what is missing."""
    asked: set[tuple[int, int]] = set()

    def reaches(one: int, two: int) -> bool:
        asked.add((one, two))
        return (one, two) != apart

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    found = [_reach_one_another(torch.device("cuda", 4 + rank), rank, 3) for rank in range(3)]
    assert found == [apart is None] * 3
    assert asked <= {(one, two) for one in (4, 5, 6) for two in (4, 5, 6) if one != two}
    assert apart is not None or len(asked) == 6
    assert caplog.text.count("GPUs 4 to 6 do not read one another's memory") == (apart is not None)
