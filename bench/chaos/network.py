"""A network of its own for each process: namespaces on one bridge, and lines between two of them that can be cut.

A cut loses packets silently, as a dead switch does: each end sends the other's to a hardware address that nobody has.
Needs root, and Linux's network namespaces. `close` leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_BRIDGE = "mlchaos"
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
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{_PREFIX}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for name, number in self._numbers.items():
            space = self._space(name)
            _ip("netns", "add", space)
            _ip("link", "add", f"mlc-{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", f"mlc-{number}", "master", _BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self._numbers:
            _ip("netns", "del", self._space(name), may_fail=True)
        _ip("link", "del", _BRIDGE, may_fail=True)

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
        _ip("link", "set", f"mlc-{self._numbers[name]}", "down")

    def mend(self) -> None:
        for number in self._numbers.values():
            _ip("link", "set", f"mlc-{number}", "up")
        for one, other in self._cut:
            for here, there in ((one, other), (other, one)):
                _ip("-n", self._space(here), "neigh", "del", self.address(there), "dev", "eth0")
        self._cut.clear()

    def _space(self, name: str) -> str:
        return f"mlchaos-{self._numbers[name]}"


def _ip(*arguments: str, may_fail: bool = False) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode and not may_fail:
        raise OSError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")
