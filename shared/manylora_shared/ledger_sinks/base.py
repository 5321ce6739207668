"""The seam to where the ledger's rows are kept. Sinks block: their callers have threads for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from manylora_shared.errors import InvalidRequest, ServiceUnavailable
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, Sum

MAX_PAGE = 5_000


class SinkDown(ServiceUnavailable):
    """Nothing was kept or read; the same again may help."""


class Page(NamedTuple):
    rows: Sequence[UsageRow]
    after: str  # where the next one begins; empty: there is none


class Sink(Protocol):
    """A row counts once, whatever is put again. All methods raise SinkDown."""

    def put(self, rows: Sequence[UsageRow]) -> None:
        """Returns when they outlast a loss of power."""
        ...

    def page(self, query: Query, after: str, limit: int) -> Page:
        """By their ends. Raises InvalidRequest where `after` is of no page."""
        ...

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]: ...

    def close(self) -> None: ...


def page_end(last: UsageRow) -> str:
    return f"{last.ended_unix_s!r} {last.request_id}"


def read_page_end(after: str) -> tuple[float, str]:
    """Raises InvalidRequest."""
    at, _, request_id = after.partition(" ")
    try:
        return float(at), request_id
    except ValueError:
        raise InvalidRequest.of("after", f"{after[:40]!r} is no page's end") from None
