"""What every service can be told."""

from __future__ import annotations

import pytest
from manylora_shared.process.config import ConfigError, parse
from manylora_shared.process.settings import ServiceSettings


def test_a_service_starts_with_nothing_said() -> None:
    settings = parse(ServiceSettings, [], {})
    assert (settings.listen, settings.advertise, settings.log_level) == ("127.0.0.1:0", "", "info")
    assert (settings.otlp_endpoint, settings.trace_file) == ("", "")


@pytest.mark.parametrize("flag", ["--listen=nowhere", "--lease-ttl-s=1", "--log-level=loud"])
def test_what_is_wrong_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError):
        parse(ServiceSettings, [flag], {})
