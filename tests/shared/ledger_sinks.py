"""What every sink of the usage ledger does: one suite over all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, summed
from manylora_shared.ledger_sinks.base import Sink

DAY = datetime(2026, 11, 25, tzinfo=UTC).timestamp()


def rows_of(count: int, seed: int = 1) -> list[UsageRow]:
    rng = random.Random(seed)
    return [
        UsageRow(
            request_id=f"{seed}-{i:06d}",
            tenant=rng.choice(("acme", "globex")),
            key=rng.choice(("", "k1")),
            qos_class=rng.choice(("batch", "standard")),
            adapter=rng.choice(("", "support", "a+b")),
            adapter_version=rng.choice(("", "1", "3+1")),
            outcome=rng.choice(("completed", "cancelled")),
            degraded=rng.random() < 0.1,
            prompt_tokens=rng.randrange(5000),
            completion_tokens=rng.randrange(500),
            kv_byte_seconds=rng.randrange(1 << 62),  # as no request has, so that sums pass 64 bits
            decode_flops=rng.randrange(1 << 62),
            price_nanos=rng.randrange(10**9),
            ended_unix_s=DAY + rng.choice((0.0, 86_399.5, 86_400.0, rng.random() * 3e6)),
        )
        for i in range(count)
    ]


def check_sums(sink: Sink, rows: list[UsageRow]) -> None:
    for query in (Query(), Query("acme"), Query("acme", DAY, DAY + 86_400), Query("nobody")):
        taken = [row for row in rows if query.takes(row)]
        for by in ((), ("tenant",), ("tenant", "adapter", "version", "class", "key", "outcome"), ("month", "day")):
            assert sink.sums(query, by) == summed(taken, by)


def check_pages(sink: Sink, rows: list[UsageRow]) -> None:
    query, after, found = Query("acme", DAY, DAY + 1e6), "", []
    while True:
        page = sink.page(query, after, 7)
        found += page.rows
        if not page.after:
            break
        after = page.after
    wanted = sorted((row for row in rows if query.takes(row)), key=lambda row: (row.ended_unix_s, row.request_id))
    assert found == wanted


def check_sink(open_sink: Callable[[], Sink]) -> None:
    rows = rows_of(200)
    sink = open_sink()
    sink.put(rows[:120])
    sink.put(rows[60:])  # some come again
    sink.put([])
    check_sums(sink, rows)
    check_pages(sink, rows)
    assert sink.page(Query(), "", 10_000).rows
    with pytest.raises(InvalidRequest, match="after"):
        sink.page(Query(), "no page", 5)
    sink.close()
    again = open_sink()
    again.put(rows[:50])
    check_sums(again, rows)
    again.close()
