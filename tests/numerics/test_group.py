from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.ranks.group import RankGroup, _reach_one_another


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


def test_a_process_that_meets_others_again_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would wait for five minutes: torch's names of what was met are counted from the process's start."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(RankGroup, "_is_first_symmetric", True)
    RankGroup(0, 2, torch.device("cuda", 0), tmp_path / "store")
    with pytest.raises(RuntimeError, match="has met others"):
        RankGroup(0, 2, torch.device("cuda", 0), tmp_path / "other")
    RankGroup(0, 2, torch.device("cuda", 0), tmp_path / "third", is_symmetric=False)
