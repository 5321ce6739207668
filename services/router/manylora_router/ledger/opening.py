"""From settings to a ledger: which sink, where the log lies, what requests cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manylora_shared.encryption.names import NameSeal
from manylora_shared.encryption.sealing import SealingKeys
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import NO_PRICES, PriceList, parse_prices
from manylora_shared.ledger_sinks.opening import log_folder, open_sink
from manylora_shared.ledger_sinks.sealed import SealedSink
from manylora_shared.process.clock import SystemClock

from manylora_router.ledger.ledger import Ledger, WhenFull
from manylora_router.ledger.sealing import LogSeals


def ledger_of(
    place: str,
    log: str,
    prices: str,
    *,
    max_mb: int,
    when_full: WhenFull,
    getrandbits: Callable[[int], int],
    keys: SealingKeys | None = None,
    via: str = "",
) -> Callable[[str, Callable[[str], Served]], Ledger] | None:
    """keys: what seals the log, and names in rows; None: nothing is sealed.

    None: there is no ledger. Raises OSError, ValueError, InvalidRequest; so does the opener.
    """
    if not place:
        return None
    sink = SealedSink(open_sink(place, via), NameSeal(keys))
    root = Path(log) if log else log_folder(place)
    if root is None:
        raise ValueError(f"--ledger-log: must be given beside --ledger={place}")
    listed = _read(Path(prices)) if prices else NO_PRICES

    def opened(router_id: str, served: Callable[[str], Served]) -> Ledger:
        return Ledger(
            root,
            sink,
            router_id=router_id,
            instance=f"{router_id}-{getrandbits(64):016x}",
            clock=SystemClock(),
            served=served,
            prices=listed,
            max_bytes=max_mb << 20,
            when_full=when_full,
            seals=LogSeals(keys),
        )

    return opened


def _read(path: Path) -> PriceList:
    return parse_prices(path.read_text(encoding="utf-8"))
