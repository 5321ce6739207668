"""Stored policies."""

from __future__ import annotations

import pytest
from manylora_shared.coordination.policies import stored_policy


def test_a_policy_is_read() -> None:
    policy = stored_policy("acme", 'tenant_id: "acme"\n')
    assert policy is not None
    assert policy.tenant_id == "acme"


@pytest.mark.parametrize("text", ["tenant_id: [", 'tenant_id: "acme"\nfrom_a_later_version: 1\n'])
def test_one_that_cannot_be_read_is_logged_with_its_tenant(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert stored_policy("acme", text) is None
    (record,) = caplog.records
    assert record.message == "a stored policy cannot be read"
    assert "acme" in str(vars(record))
