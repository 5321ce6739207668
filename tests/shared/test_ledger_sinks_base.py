from __future__ import annotations

from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ledger_sinks.base import SinkDown


def test_who_reads_of_a_sink_that_is_down_may_try_again() -> None:
    down = SinkDown("gone", retry_after_s=1.0)
    assert isinstance(down, ServiceUnavailable)
    assert down.retry_after_s == 1.0
