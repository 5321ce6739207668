"""The secret of the services of a simulated cluster."""

from __future__ import annotations

from manylora_shared.coordination.peers import PeerSecret

SIMULATED = PeerSecret("0123456789abcdef" * 4)
