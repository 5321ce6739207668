from __future__ import annotations

from manylora_router.ledger.rows import NoRows
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.row import UsageRow


def test_without_a_ledger_nothing_is_kept() -> None:
    rows, row = NoRows(), UsageRow(request_id="r", tenant="a")
    rows.check_room()
    rows.open(row, lambda: ())
    rows.close(row)
    assert (rows.served("default"), rows.now_unix_s(), rows.router_id) == (Served(), 0.0, "")
