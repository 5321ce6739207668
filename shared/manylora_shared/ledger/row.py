"""The usage ledger's row: what one request used and what it costs. Whatever keeps, sends or shows usage has these
columns, by these names; `qos_class` is shown as `class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from manylora_shared.ids import DEFAULT_POOL

LOST = "lost"  # the outcome of a request whose router died: its tokens are those of the router's last note
SHOWN = {"qos_class": "class"}
NANOS = 1_000_000_000  # of a unit of the price list's currency


class UsageRow(NamedTuple):
    """A tuple: a router makes, writes, reads and sends one for each request."""

    request_id: str
    tenant: str
    key: str = ""  # the API key's id; empty: a token's, or the router's own
    qos_class: str = ""
    pool: str = DEFAULT_POOL
    model: str = ""
    adapter: str = ""  # of a composition each part's name, joined by +, as in the next two; empty: the base model
    adapter_version: str = ""
    adapter_digest: str = ""
    outcome: str = ""
    degraded: bool = False  # overload gave it fewer tokens than it asked for
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, found in the prefix cache
    completion_tokens: int = 0  # that the caller was given
    unread_tokens: int = 0  # drawn for a request that was cut short, and given to nobody
    reused_tokens: int = 0  # of the completion, computed again when another worker went on
    resumes: int = 0
    kv_byte_seconds: int = 0  # on the device
    adapter_byte_seconds: int = 0  # on the device, shared among the requests that held the adapter at a time
    adapter_loads: int = 0  # 1: its adapter was not on the device when it came
    prefill_flops: int = 0
    decode_flops: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0  # 0: there was no token
    duration_ms: float = 0.0
    began_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    trace_id: str = ""
    router: str = ""
    worker: str = ""  # the last one
    price_list: str = ""  # and its version; empty: there is none
    price_nanos: int = 0

    @property
    def settled_tokens(self) -> int:
        """What its tenant's quota was charged, unless it is lost."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens + self.unread_tokens

    def values(self) -> tuple[Any, ...]:
        """In the order of COLUMNS."""
        return self

    @staticmethod
    def of(columns: Sequence[str], values: Sequence[Any]) -> UsageRow:
        """Columns that this version does not know are left out, those that are missing have their defaults."""
        if len(columns) != len(values):
            raise ValueError("a row of the ledger has not its columns")
        if columns == _LISTED:
            return UsageRow(*values)
        given = zip(columns, values, strict=True)
        return UsageRow(**{name: KINDS[name](value) for name, value in given if name in KINDS})

    def shown(self) -> dict[str, Any]:
        return shown(dict(zip(COLUMNS, self.values(), strict=True)))


COLUMNS: tuple[str, ...] = UsageRow._fields
_LISTED = list(COLUMNS)  # as a log's header has them
KINDS: Mapping[str, type] = {name: type(UsageRow._field_defaults.get(name, "")) for name in COLUMNS}
# What sums are made of, in whole numbers.
SUMMED: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind is int and name != "choices")


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """As people and programs outside read them: with the price in the list's currency."""
    told = {SHOWN.get(name, name): value for name, value in values.items() if name != "price_nanos"}
    told["price"] = values["price_nanos"] / NANOS
    return told
