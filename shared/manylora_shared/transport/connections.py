"""The connections at a server's port, by whose key came over them. Owns which of them are cut off.

gRPC bounds neither their number nor their rest, and each holds one of the process's open files.
"""

# gRPC gives no hold of its connections, but they are open files of this process: whose other end has the name that a
# call's `peer` tells. A cut is a shutdown of the socket, by which gRPC sees the other side leave.

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 16_384  # and at most half of what the process may have open
MAX_STRANGERS = 1_024  # of these, that no key came over
SWEEP_S = 0.5  # a stranger is not cut off sooner
_SLICE = 200  # open files that are looked at in a pass of the event loop
_FILES = "/dev/fd"
STRANGER = ""


def room() -> int:
    """Connections of a server; first lets the process have as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS: the hard limit may be more than the kernel's
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def fair_level(counts: Iterable[int], capacity: int) -> int | None:
    """How many each may have at most so that all fit: max-min. None: all fit as they are."""
    ordered = sorted(counts)
    for index, count in enumerate(ordered):
        share = capacity // (len(ordered) - index)
        if count > share:
            return share
        capacity -= count
    return None


@dataclass(frozen=True)
class _Seen:
    inode: int
    peer: str | None  # None: it is no connection of this port
    sweep: int  # that saw it first


class Connections:
    def __init__(self, capacity: int, max_strangers: int = MAX_STRANGERS) -> None:
        self._capacity = capacity
        self._max_strangers = max_strangers
        self._owners: dict[str, tuple[str, int]] = {}  # by peer: whose key came last, in which sweep
        self._files: dict[int, _Seen] = {}
        self._sweep = 0

    def vouch(self, peer: str, owner: str) -> None:
        """peer: as gRPC writes it."""
        self._owners[peer] = (owner, self._sweep)

    def owner_of(self, peer: str) -> str:
        return self._owners.get(peer, (STRANGER, 0))[0]

    def cut(self, peer: str) -> None:
        """peer: as gRPC writes it; of one that no sweep has seen yet nothing is cut off."""
        for fd, seen in self._files.items():
            if seen.peer == peer:
                _cut(fd, seen)

    async def keep(self, port: int) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            if cut := await self.sweep(port):
                told = ", ".join(f"{n} of {owner or 'strangers'}" for owner, n in cut.most_common(8))
                _LOG.warning("too many connections at port %d: cut off %s", port, told)

    async def sweep(self, port: int) -> Counter[str]:
        """Cuts off who has too many. Returns how many of whose."""
        self._sweep += 1
        held: defaultdict[str, list[int]] = defaultdict(list)
        peers: set[str] = set()
        files: dict[int, _Seen] = {}
        for index, fd in enumerate(await asyncio.to_thread(_open_files)):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            seen = self._look(fd, port)
            if seen is None:
                continue
            files[fd] = seen
            if seen.peer is not None:
                peers.add(seen.peer)
                held[self._owners.get(seen.peer, (STRANGER, 0))[0]].append(fd)
        self._files = files
        self._owners = {peer: owned for peer, owned in self._owners.items() if peer in peers or owned[1] == self._sweep}
        cut: Counter[str] = Counter()
        for index, (owner, fd) in enumerate(list(self._beyond(held))):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            cut[owner] += _cut(fd, files[fd])
        return +cut

    def _look(self, fd: int, port: int) -> _Seen | None:
        try:
            inode = os.fstat(fd).st_ino
        except OSError:
            return None  # it was closed meanwhile
        known = self._files.get(fd)
        if known is not None and known.inode == inode:
            return known
        return _Seen(inode, _peer_of(fd, port), self._sweep)

    def _age(self, fd: int) -> int:
        return self._files[fd].sweep

    def _beyond(self, held: dict[str, list[int]]) -> Iterator[tuple[str, int]]:
        """Of strangers the oldest go, that had the time to show a key; of a key's the newest."""
        strangers = held.pop(STRANGER, [])
        old = [fd for fd in strangers if self._files[fd].sweep < self._sweep]
        old.sort(key=self._age)
        yield from ((STRANGER, fd) for fd in old[: max(0, len(strangers) - self._max_strangers)])
        level = fair_level(map(len, held.values()), self._capacity - min(len(strangers), self._max_strangers))
        if level is None:
            return
        for owner, fds in held.items():
            fds.sort(key=self._age)
            yield from ((owner, fd) for fd in fds[level:])


def _peer_of(fd: int, port: int) -> str | None:
    """As gRPC writes it."""
    try:
        looked_at = socket.socket(fileno=fd)
    except OSError:
        return None  # no socket
    try:
        here, there = looked_at.getsockname(), looked_at.getpeername()
    except OSError:
        return None  # it listens, or has ended
    finally:
        looked_at.detach()
    if not isinstance(here, tuple) or here[1] != port:
        return None
    host = str(there[0]).removeprefix("::ffff:")
    return f"ipv6:%5B{quote(host, safe=':')}%5D:{there[1]}" if ":" in host else f"ipv4:{host}:{there[1]}"


def _cut(fd: int, seen: _Seen) -> int:
    """Returns how many it cut off: none where the file is another one by now."""
    try:
        ours = os.dup(fd)  # so that it is no other one before it is cut
    except OSError:
        ours = fd  # there is no file left
    try:
        if os.fstat(ours).st_ino != seen.inode:
            return 0
        connection = socket.socket(fileno=ours)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
    except OSError:
        return 0  # it has ended
    finally:
        if ours != fd:
            os.close(ours)
    return 1


def _open_files() -> Iterable[int]:
    try:
        return list(map(int, os.listdir(_FILES)))
    except OSError:  # listing takes a file, and there is none left
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
