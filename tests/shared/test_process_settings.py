"""What every service can be told."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_shared.process.config import ConfigError, parse
from manylora_shared.process.settings import ServiceSettings
from manylora_shared.transport.tls import TlsFiles


def test_a_service_starts_with_nothing_said() -> None:
    settings = parse(ServiceSettings, [], {})
    assert (settings.listen, settings.advertise, settings.log_level) == ("127.0.0.1:0", "", "info")
    assert (settings.otlp_endpoint, settings.trace_file) == ("", "")


@pytest.mark.parametrize("flag", ["--listen=nowhere", "--lease-ttl-s=1", "--log-level=loud"])
def test_what_is_wrong_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError):
        parse(ServiceSettings, [flag], {})


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "::", "0", "0x0", "0.0", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "*"]
)
def test_where_nobody_can_dial_what_is_served_on_an_address_to_dial_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="--advertise: must be set, for nobody can dial"):
        parse(ServiceSettings, [f"--listen={host}:7070"], {})
    given = [f"--listen={host}:7070", "--advertise=router:7070"]
    settings = parse(ServiceSettings, [*given, "--allow-plain-text"], {})
    assert settings.advertise == "router:7070"
    with pytest.raises(ConfigError, match="so it needs --tls-cert and --tls-key; --allow-plain-text"):
        parse(ServiceSettings, given, {})
    with pytest.raises(ConfigError, match="--advertise: "):
        parse(ServiceSettings, ["--listen=10.0.0.1:7070", f"--advertise={host}:7070"], {})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_on_this_machine_plain_text_will_do(host: str) -> None:
    assert parse(ServiceSettings, [f"--listen={host}:7070"], {}).tls_files is None


def test_the_files_of_tls_go_together() -> None:
    for given in (["--tls-cert=c"], ["--tls-key=k"], ["--tls-ca=a"]):
        with pytest.raises(ConfigError, match="--tls-"):
            parse(ServiceSettings, given, {})
    settings = parse(ServiceSettings, ["--listen=10.0.0.1:7070", "--tls-cert=c", "--tls-key=k", "--tls-ca=a"], {})
    assert settings.tls_files == TlsFiles(Path("c"), Path("k"), Path("a"))


@pytest.mark.parametrize("advertise", ["router", "router:x", ":1", "router:0"])
def test_what_nobody_can_dial_is_not_advertised(advertise: str) -> None:
    with pytest.raises(ConfigError, match="--advertise: "):
        parse(ServiceSettings, [f"--advertise={advertise}"], {})
