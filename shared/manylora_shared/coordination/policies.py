"""Tenants' policies as they are stored."""

from __future__ import annotations

import logging

from manylora_shared.errors import InvalidRequest
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy, parse_policy

_LOG = logging.getLogger(__name__)


def stored_policy(tenant_id: str, text: str) -> TenantPolicy | None:
    # None: it was written past AdminService, or by a version that knows more. The last policy stays in force.
    try:
        return parse_policy(text)
    except InvalidRequest as e:
        _LOG.error("a stored policy cannot be read", extra=fields(tenant=tenant_id, error=e.message))
        return None
