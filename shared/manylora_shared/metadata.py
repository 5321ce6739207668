"""The keys of a call's metadata: for whom it is, and which service shows that it belongs to the cluster."""

from __future__ import annotations

TENANT_KEY = "x-tenant-id"
CLASS_KEY = "x-request-class"
ADAPTER_KEY = "x-adapter-id"
CONVERSATION_KEY = "x-conversation-id"  # and user: who keeps an adapter's version in a rollout
USER_KEY = "x-user-id"
PRIORITY_KEY = "x-priority"
IDEMPOTENCY_KEY = "idempotency-key"
KEEP_KEY = "x-keep-s"  # of HTTP: as GenerateRequest.keep_s
LAST_EVENT_ID = "last-event-id"  # of HTTP: the last one that the caller has of its answer
HEDGE_KEY = "x-hedge"  # of two calls for one answer: the one that is cancelled before its first frame costs nothing
TRACEPARENT_KEY = "traceparent"
PEER_KEY = "x-manylora-peer"
CALLER_KEY = "x-manylora-caller"  # beside it: the host of the caller in whose name a router asks another one
REQUEST_ID_KEY = "x-request-id"  # of an administrative act, in the audit log
