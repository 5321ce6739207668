from __future__ import annotations

from pathlib import Path

import pytest
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.opening import log_folder, open_sink


def test_a_setting_names_a_sink(tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:{tmp_path}/usage.sqlite")
    assert sink.sums(Query(), ()) == []
    assert (tmp_path / "usage.sqlite").exists()
    assert log_folder(f"sqlite:{tmp_path}/usage.sqlite") == tmp_path / "ledger-log"
    for place in ("sqlite:", "usage.sqlite", "oracle:x"):
        with pytest.raises(ValueError, match="is not sqlite:FILE"):
            open_sink(place)
