"""What every service can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manylora_shared.address import is_any_host, parse_address
from manylora_shared.process.config import ConfigError, check_bounds, check_listen, setting


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    listen: str = setting("127.0.0.1:0", "host:port to serve on; port 0: any free one")
    advertise: str = setting("", "host:port that others dial; empty: the bound one")
    etcd: str = setting("127.0.0.1:2379", "etcd's endpoints, comma-separated host:port")
    lease_ttl_s: int = setting(2, "how long others take a silent service for alive", at_least=2)
    otlp_endpoint: str = setting("", "OTLP gRPC receiver of traces, host:port; empty: none")
    trace_file: str = setting("", "file to append traces to, one JSON object a line; empty: none")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "on stderr")

    def __post_init__(self) -> None:
        check_listen(self.listen)
        check_bounds(self)
        if not self.advertise:
            if is_any_host(self.listen.rpartition(":")[0]):
                raise ConfigError(f"--advertise: must be set, for nobody can dial {self.listen}")
            return
        try:
            host, port = parse_address(self.advertise)
        except ValueError as e:
            raise ConfigError(f"--advertise: {e}") from e
        if is_any_host(host) or port == 0:
            raise ConfigError(f"--advertise: nobody can dial {self.advertise}")
