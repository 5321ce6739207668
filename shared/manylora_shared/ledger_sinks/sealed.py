"""A sink in which the texts of a row that name something of its tenant's are sealed, under the tenant's key.

Amounts, times and the tenant's name stay in the clear, so that sums need no key, and bills outlast the tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manylora_shared.encryption.names import UNREADABLE, NameSeal
from manylora_shared.errors import NotFound
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import GROUPS, TOTALS, Query, Sum
from manylora_shared.ledger_sinks.base import Page, Sink

SEALED = ("key", "adapter", "adapter_digest", "trace_id")


class SealedSink:
    def __init__(self, sink: Sink, names: NameSeal) -> None:
        self._sink = sink
        self._names = names

    def put(self, rows: Sequence[UsageRow]) -> None:
        """Raises ServiceUnavailable, too: a key cannot be had now."""
        self._sink.put([self._sealed(row) for row in rows] if self._names.is_on else rows)

    def page(self, query: Query, after: str, limit: int) -> Page:
        page = self._sink.page(query, after, limit)
        return Page([self._opened(row) for row in page.rows], page.after)

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        if not any(GROUPS[name] in SEALED for name in by):
            return self._sink.sums(query, by)
        totals: dict[tuple[str, ...], list[int]] = {}
        for each in self._sink.sums(query, tuple(dict.fromkeys(("tenant", *by)))):
            group = tuple([self._word(each.group["tenant"], name, each.group[name]) for name in by])
            known = totals.setdefault(group, [0] * len(TOTALS))
            totals[group] = [have + each.totals[name] for have, name in zip(known, TOTALS, strict=True)]
        return [
            Sum(dict(zip(by, group, strict=True)), dict(zip(TOTALS, amounts, strict=True)))
            for group, amounts in sorted(totals.items())
        ]

    def close(self) -> None:
        self._sink.close()

    def _sealed(self, row: UsageRow) -> UsageRow:
        texts = {name: text for name in SEALED if (text := getattr(row, name))}
        try:
            return _with(row, {name: self._names.seal(row.tenant, name, text) for name, text in texts.items()})
        except NotFound:  # the tenant was deleted before its row came here
            return _with(row, dict.fromkeys(texts, UNREADABLE))

    def _opened(self, row: UsageRow) -> UsageRow:
        return _with(row, {name: self._names.open(row.tenant, name, getattr(row, name)) for name in SEALED})

    def _word(self, tenant: str, group: str, text: str) -> str:
        column = GROUPS[group]
        return self._names.open(tenant, column, text) if column in SEALED else text


def _with(row: UsageRow, texts: dict[str, Any]) -> UsageRow:
    return row._replace(**texts)
