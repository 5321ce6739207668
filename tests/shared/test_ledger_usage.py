from __future__ import annotations

from datetime import UTC, datetime

import pytest
from manylora.v1 import usage_pb2
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, groups_of, moment, month, month_of, summed, told_of

_DAY = datetime(2026, 11, 25, tzinfo=UTC).timestamp()


def _row(number: int, tenant: str, ended: float, **amounts: int) -> UsageRow:
    return UsageRow(request_id=f"r{number}", tenant=tenant, ended_unix_s=ended, **amounts)


def test_rows_are_summed_by_what_is_asked() -> None:
    rows = [
        _row(1, "b", _DAY, prompt_tokens=1, completion_tokens=10),
        _row(2, "a", _DAY + 86_399, prompt_tokens=2, cached_tokens=1),
        _row(3, "a", _DAY + 86_400, prompt_tokens=4, price_nanos=5),
    ]
    found = summed(rows, ("tenant", "day"))
    assert [tuple(each.group.values()) for each in found] == [
        ("a", "2026-11-25"),
        ("a", "2026-11-26"),
        ("b", "2026-11-25"),
    ]
    (total,) = summed(rows, ())
    assert (total.totals["requests"], total.totals["prompt_tokens"], total.settled_tokens) == (3, 7, 16)
    assert [each.shown()["month"] for each in summed(rows, ("month",))] == ["2026-11"]
    assert not summed([], ())


def test_a_query_takes_ends_from_its_beginning_until_before_its_end() -> None:
    query = Query("a", 10.0, 20.0)
    assert [query.takes(_row(1, "a", at)) for at in (9.0, 10.0, 19.9, 20.0)] == [False, True, True, False]
    assert not query.takes(_row(1, "b", 15.0))
    assert Query().takes(_row(1, "b", 15.0))


def test_groups_have_names() -> None:
    assert groups_of(["tenant", "", "day", "tenant"]) == ("tenant", "day")
    with pytest.raises(InvalidRequest, match="by: 'colour' is none of tenant, adapter"):
        groups_of(["colour"])


def test_times_are_read_in_utc() -> None:
    assert moment("2026-11-25", "since") == moment("2026-11-25T00:00:00Z", "since") == _DAY
    assert moment("2026-11-25T01:00:00+01:00", "since") == moment(str(_DAY), "since") == _DAY
    assert moment("2026-11", "since") == month("2026-11")[0] == month_of(_DAY)[0]
    assert month("2026-12") == (moment("2026-12-01", ""), moment("2027-01-01", ""))
    assert month_of(_DAY)[1] == month("2026-12")[0]
    for text in ("yesterday", "2026-13-01", "nan", "inf"):
        with pytest.raises(InvalidRequest, match="since"):
            moment(text, "since")
    with pytest.raises(InvalidRequest, match="no month"):
        month("2026-11-25")


def test_a_message_is_told_as_a_row_or_as_a_sum() -> None:
    message = usage_pb2.UsageRow(requests=1, tenant="a", qos_class="batch", prompt_tokens=3, price_nanos=10**9)
    told = told_of(message, None)
    assert (told["tenant"], told["class"], told["prompt_tokens"], told["price"]) == ("a", "batch", 3, 1.0)
    message = usage_pb2.UsageRow(requests=2, day="2026-11-25", qos_class="batch", prompt_tokens=3)
    told = told_of(message, ("day", "class"))
    assert (told["day"], told["class"], told["requests"], told["prompt_tokens"]) == ("2026-11-25", "batch", 2, 3)
    assert "tenant" not in told
