"""A network of its own for each process: namespaces on one bridge, and lines between two of them that can be cut.

The bridge has a namespace too: on the machine's own, Docker's rules for what is forwarded would drop what crosses it.
A cut loses packets silently, as a dead switch does: each end sends the other's to a hardware address that nobody has.
Needs root, and Linux's network namespaces. `close` leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_SWITCH = "mlchaos-switch"  # the bridge's namespace
_BRIDGE, _HOST = "bridge", "host"  # in it
_HERE = "mlchaos"  # the callers' end, in the machine's own
_PREFIX = "10.77.0"
_NOBODY = "02:00:00:00:00:99"


def is_possible() -> str:
    """Why not; empty: it is."""
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "it needs root"
    tried = subprocess.run(["ip", "netns", "add", "mlchaos-try"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    _ip("netns", "del", "mlchaos-try")
    return ""


class Networks:
    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._cut: set[tuple[str, str]] = set()

    def open(self) -> None:
        self.close()
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", _BRIDGE, "up")
        _ip("link", "add", _HERE, "type", "veth", "peer", "name", _HOST, "netns", _SWITCH)
        _ip("-n", _SWITCH, "link", "set", _HOST, "master", _BRIDGE, "up")
        _ip("addr", "add", f"{_PREFIX}.254/24", "dev", _HERE)
        _ip("link", "set", _HERE, "up")
        for name in self._numbers:
            space, line = self._space(name), self._line(name)
            _ip("netns", "add", space)
            _ip("-n", _SWITCH, "link", "add", line, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", _SWITCH, "link", "set", line, "master", _BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def close(self) -> None:
        """Also what a run left that was killed."""
        _ip("link", "del", _HERE, may_fail=True)  # a namespace that goes takes its links only later
        for space in (*map(self._space, self._numbers), _SWITCH):
            _ip("netns", "del", space, may_fail=True)

    def address(self, name: str) -> str:
        return f"{_PREFIX}.{self._numbers[name]}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """What runs it in its namespace."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def cut(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            lost = (self.address(there), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            _ip("-n", self._space(here), "neigh", "replace", *lost)
        self._cut.add((one, other))

    def isolate(self, name: str) -> None:
        """From everybody, callers too."""
        _ip("-n", _SWITCH, "link", "set", self._line(name), "down")

    def mend(self) -> None:
        for name in self._numbers:
            _ip("-n", _SWITCH, "link", "set", self._line(name), "up")
        for one, other in self._cut:
            for here, there in ((one, other), (other, one)):
                _ip("-n", self._space(here), "neigh", "del", self.address(there), "dev", "eth0")
        self._cut.clear()

    def _line(self, name: str) -> str:
        return f"line-{self._numbers[name]}"

    def _space(self, name: str) -> str:
        return f"mlchaos-{self._numbers[name]}"


def _ip(*arguments: str, may_fail: bool = False) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode and not may_fail:
        raise OSError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")
