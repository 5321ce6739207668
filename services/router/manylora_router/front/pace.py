"""How many bytes of large messages a tenant's calls may bring in a second, over both fronts."""

from __future__ import annotations

from manylora_shared.transport.places import Pace

LONGEST_WAIT_S = 2.0  # whose bytes all lie in memory


def bytes_pace(bytes_per_s: int) -> Pace:
    told = f"this tenant's calls bring more than {bytes_per_s >> 20} MiB a second of messages over 32 KiB"
    return Pace(bytes_per_s, told, longest_wait_s=LONGEST_WAIT_S)
