"""A tenant's policy document, and what it is written as again."""

from __future__ import annotations

from manylora_shared.coordination.policies import stored_policy
from manylora_shared.tenancy.policy import line_of, parse_policy

from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    stored_policy("acme", data)
    text = data.decode(errors="surrogateescape")
    policy = parse_policy(text)
    assert parse_policy(policy.to_yaml()) == policy
    assert line_of(text, "quotas.max_queued") >= 1


HARNESS = Harness(run, max_bytes=17_000)
