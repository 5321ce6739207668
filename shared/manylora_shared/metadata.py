"""The keys of a call's metadata that say for whom it is."""

from __future__ import annotations

TENANT_KEY = "x-tenant-id"
CLASS_KEY = "x-request-class"
ADAPTER_KEY = "x-adapter-id"
PRIORITY_KEY = "x-priority"
IDEMPOTENCY_KEY = "idempotency-key"
TRACEPARENT_KEY = "traceparent"
