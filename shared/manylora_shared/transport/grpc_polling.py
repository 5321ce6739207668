"""Which of gRPC's threads waits for its sockets: the one that tells the event loop (docs/decisions/0031).

gRPC reads its environment when it is imported, so services import this before.
"""

from __future__ import annotations

from manylora_shared.process.config import set_default

EXPERIMENTS = "GRPC_EXPERIMENTS"
_EVENT_ENGINE = (
    "event_engine_client",
    "event_engine_listener",
    "event_engine_for_all_other_endpoints",
)

set_default(EXPERIMENTS, ",".join(f"-{name}" for name in _EVENT_ENGINE))
