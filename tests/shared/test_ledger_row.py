from __future__ import annotations

from manylora_shared.ledger.row import COLUMNS, SUMMED, UsageRow, shown


def test_a_row_comes_back_from_its_values_and_from_those_of_other_versions() -> None:
    row = UsageRow(request_id="r", tenant="a", qos_class="batch", degraded=True, prompt_tokens=7, queue_ms=1.5)
    assert UsageRow.of(COLUMNS, row.values()) == row
    assert UsageRow.of(["tenant", "request_id", "of a later version"], ["a", "r", 5]) == UsageRow(
        request_id="r", tenant="a"
    )


def test_it_is_shown_with_its_class_and_its_price() -> None:
    told = UsageRow(request_id="r", tenant="a", qos_class="batch", price_nanos=1_500_000_000).shown()
    assert (told["class"], told["price"]) == ("batch", 1.5)
    assert not {"qos_class", "price_nanos"} & told.keys()
    assert shown({"price_nanos": 1}) == {"price": 1e-9}


def test_what_is_settled_is_what_its_parts_add_up_to() -> None:
    row = UsageRow(request_id="r", tenant="a", prompt_tokens=10, cached_tokens=4, completion_tokens=3, unread_tokens=2)
    assert row.settled_tokens == 11
    assert {"prompt_tokens", "kv_byte_seconds", "price_nanos"} < set(SUMMED)
    assert not {"choices", "ttft_ms", "degraded"} & set(SUMMED)
