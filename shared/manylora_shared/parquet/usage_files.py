"""The ledger in Parquet files, a folder a day: for routers that share a folder, and for whoever reads Parquet.

A batch is a file, which is never changed. Many small files become one larger file, and then go: until they have gone,
and where a batch was sent again, a row is in two files, so whoever reads counts a request id once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import dataset
from pyarrow import parquet as pq

from manylora_shared.ledger.row import COLUMNS, KINDS, SUMMED, UsageRow
from manylora_shared.ledger.usage import GROUPS, TOTALS, Query, Sum
from manylora_shared.ledger_sinks.base import Page, SinkDown, page_end, read_page_end

MERGED = 32  # files of a tier become one of the next
_DAY = "day="
_SUFFIX = ".parquet"
_PART = ".part"
_STALE_S = 3600.0  # of a part that a router was writing when it died
_LOOKS = 10  # at a folder that is merged meanwhile
_ROW_GROUP = 20_000
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in KINDS.items()])
_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_SPLIT_BITS = 30  # large numbers are summed in two parts: sums here end at 63 bits
_TIMES = {"day": 10, "month": 7}  # letters of the folder's day
T = TypeVar("T")


class ParquetSink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, rows: Sequence[UsageRow]) -> None:
        days: dict[str, list[UsageRow]] = {}
        for row in rows:
            days.setdefault(_day(row.ended_unix_s), []).append(row)
        with _told():
            for day, of_day in sorted(days.items()):
                columns = zip(*(row.values() for row in of_day), strict=True)
                _write(self._made(day), 0, pa.table(list(map(list, columns)), schema=_SCHEMA))
                _merge(self._folder / f"{_DAY}{day}", 0)

    def page(self, query: Query, after: str, limit: int) -> Page:
        since = (query.since_unix_s, "")
        begin = max(since, read_page_end(after)) if after else since
        found: list[UsageRow] = []
        with _told():
            for day in self._days(Query(query.tenant, begin[0], query.until_unix_s)):
                first = partial(_first, query=query, begin=begin, limit=limit - len(found))
                found += _looked(day, first)
                if len(found) == limit:
                    break
        return Page(found, page_end(found[-1]) if found and len(found) == limit else "")

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        totals: dict[tuple[str, ...], list[int]] = {}
        with _told():
            for folder in self._days(query):
                day = folder.name.removeprefix(_DAY)
                for values, amounts in _looked(folder, lambda files: _summed(files, query, by)):
                    words = iter(values)
                    group = tuple([day[: _TIMES[name]] if name in _TIMES else str(next(words)) for name in by])
                    known = totals.get(group)
                    totals[group] = amounts if known is None else list(map(int.__add__, known, amounts))
        return [
            Sum(dict(zip(by, group, strict=True)), dict(zip(TOTALS, amounts, strict=True)))
            for group, amounts in sorted(totals.items())
        ]

    def close(self) -> None:
        return

    def _days(self, query: Query) -> list[Path]:
        """Folders that may have rows of it, in order."""
        first = _day(query.since_unix_s)
        last = _day(query.until_unix_s) if query.until_unix_s is not None else "9999"
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        days = (name.removeprefix(_DAY) for name in names if name.startswith(_DAY))
        return [self._folder / f"{_DAY}{day}" for day in sorted(days) if first <= day <= last]

    def _made(self, day: str) -> Path:
        folder = self._folder / f"{_DAY}{day}"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            for each in (self._folder.parent, self._folder):
                _sync(each)
        return folder


def _day(unix_s: float) -> str:
    return datetime.fromtimestamp(max(0.0, min(unix_s, _LAST)), UTC).strftime("%Y-%m-%d")


def _tier(name: str) -> int:
    return int(name.partition("-")[0])


def _files(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.endswith(_SUFFIX) and name.partition("-")[0].isdecimal()}


def _looked(folder: Path, read: Callable[[list[Path]], T]) -> T:
    """What is read of its files, none of which was merged meanwhile: that would be too few rows."""
    for _ in range(_LOOKS):
        before = _files(folder)
        try:
            found = read([folder / name for name in sorted(before)])
        except FileNotFoundError:
            continue
        after = _files(folder)
        if before <= after and not any(_tier(name) for name in after - before):
            return found
    raise SinkDown(f"the ledger's Parquet files: {folder} changes again and again", retry_after_s=1.0)


# ---- writing


def _write(folder: Path, tier: int, table: Any) -> None:
    name = f"{tier}-{secrets.token_hex(12)}{_SUFFIX}"
    part = folder / f"{name}{_PART}"
    try:
        with part.open("xb") as file:
            pq.write_table(table, file, compression="zstd", row_group_size=_ROW_GROUP)
            file.flush()
            os.fsync(file.fileno())
        part.rename(folder / name)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(folder)


def _merge(folder: Path, tier: int) -> None:
    """Any process may, at any time: a file goes only when another one has its rows, on the disk."""
    files = [folder / name for name in sorted(_files(folder)) if _tier(name) == tier]
    if len(files) < MERGED:
        return
    try:
        rows = _read(files, COLUMNS, None)
    except FileNotFoundError:
        return  # another router merges them
    _write(folder, tier + 1, rows.sort_by([("ended_unix_s", "ascending"), ("request_id", "ascending")]))
    for file in files:
        file.unlink(missing_ok=True)
    now_s = folder.stat().st_mtime  # by the folder's own clock
    for part in folder.glob(f"*{_PART}"):
        with suppress(FileNotFoundError):
            if now_s - part.stat().st_mtime > _STALE_S:
                part.unlink()
    _merge(folder, tier + 1)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


def _read(files: list[Path], columns: Sequence[str], taken: Any) -> Any:
    """Each request once. Columns that a file of an earlier version lacks have their defaults."""
    wanted = list(dict.fromkeys(["request_id", *columns]))
    table = dataset.dataset(list(map(str, files)), schema=_SCHEMA, format="parquet").to_table(wanted, filter=taken)
    for number, name in enumerate(wanted):
        if table[name].null_count:
            table = table.set_column(number, name, pc.fill_null(table[name], KINDS[name]()))
    numbered = table.select(["request_id"]).append_column("place", pa.array(range(table.num_rows), pa.int64()))
    places = numbered.group_by("request_id").aggregate([("place", "min")])["place_min"]
    return table if len(places) == table.num_rows else table.take(places)


def _taken(query: Query) -> Any:
    taken = pc.field("ended_unix_s") >= query.since_unix_s
    if query.until_unix_s is not None:
        taken &= pc.field("ended_unix_s") < query.until_unix_s
    if query.tenant:
        taken &= pc.field("tenant") == query.tenant
    return taken


def _first(files: list[Path], query: Query, begin: tuple[float, str], limit: int) -> list[UsageRow]:
    """Behind `begin`. Which ones they are is looked up first, or a page would read a whole day's columns."""
    order = [("ended_unix_s", "ascending"), ("request_id", "ascending")]
    at, request_id = begin
    ended, name = pc.field("ended_unix_s"), pc.field("request_id")
    taken = _taken(query) & ((ended > at) | ((ended == at) & (name > request_id)))
    ends = _read(files, ["ended_unix_s"], taken).sort_by(order).slice(0, limit)
    if not ends.num_rows:
        return []
    taken &= (ended <= ends["ended_unix_s"][-1]) & name.isin(ends["request_id"].combine_chunks())
    return [UsageRow(**row) for row in _read(files, COLUMNS, taken).sort_by(order).to_pylist()]


def _summed(files: list[Path], query: Query, by: Sequence[str]) -> list[tuple[list[str], list[int]]]:
    """Of each group, without its times: its values, and its totals in the order of TOTALS."""
    groups = [GROUPS[name] for name in by if name not in _TIMES]
    rows = _read(files, [*groups, "degraded", *SUMMED], _taken(query))
    columns = {name: rows[name] for name in groups} | {"degraded": pc.cast(rows["degraded"], pa.int64())}
    for name in SUMMED:
        columns[f"{name}.high"] = pc.shift_right(rows[name], _SPLIT_BITS)
        columns[f"{name}.low"] = pc.bit_wise_and(rows[name], (1 << _SPLIT_BITS) - 1)
    parts = [name for name in columns if name not in groups]
    wanted = [([], "count_all"), *((name, "sum") for name in parts)]
    found: list[tuple[list[str], list[int]]] = []
    for each in pa.table(columns).group_by(groups).aggregate(wanted).to_pylist():
        if each["count_all"]:
            amounts = [(each[f"{name}.high_sum"] << _SPLIT_BITS) + each[f"{name}.low_sum"] for name in SUMMED]
            found.append(([each[name] for name in groups], [each["count_all"], each["degraded_sum"], *amounts]))
    return found


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        told = " ".join(str(e).split())
        raise SinkDown(f"the ledger's Parquet files: {told}", retry_after_s=1.0) from e
