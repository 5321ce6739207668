"""What every service can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manylora_shared.address import is_any_host, is_loopback, parse_address
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.login import EtcdLogin
from manylora_shared.coordination.peers import PeerSecret
from manylora_shared.process.config import ConfigError, check_bounds, check_listen, setting
from manylora_shared.transport.tls import SYSTEM_CA, Tls, TlsFiles


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    listen: str = setting("127.0.0.1:0", "host:port to serve on; port 0: any free one")
    advertise: str = setting("", "host:port that others dial; empty: the bound one")
    etcd: str = setting("127.0.0.1:2379", "etcd's endpoints, comma-separated host:port")
    etcd_tls_ca: str = setting(
        "", "PEM file of who signs etcd's certificate, or `system`: whom this machine trusts; empty: plain text"
    )
    etcd_tls_cert: str = setting("", "PEM file of the certificate that etcd is shown; empty: none")
    etcd_tls_key: str = setting("", "PEM file of that certificate's key")
    etcd_login_file: str = setting("", "file with `user:password` for etcd; empty: no login")
    peer_secret_file: str = setting(
        "", "file with what the services of a cluster show one another, the same for all; made where there is none"
    )
    lease_ttl_s: int = setting(2, "how long others take a silent service for alive", at_least=2)
    tls_cert: str = setting("", "PEM file of this service's certificate and its chain; empty: plain text")
    tls_key: str = setting("", "PEM file of the certificate's key")
    tls_ca: str = setting("", "PEM file of who signs the other services' certificates, which they must show")
    allow_plain_text: bool = setting(
        False, "serve without TLS beyond this machine: keys, prompts and answers can be read on the way"
    )
    otlp_endpoint: str = setting("", "OTLP gRPC receiver of traces, host:port; empty: none")
    trace_file: str = setting("", "file to append traces to, one JSON object a line; empty: none")
    metrics_listen: str = setting("", "host:port of /metrics for Prometheus; port 0: any free one; empty: none")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "on stderr")

    @property
    def has_exposition(self) -> bool:
        """Whether there is a /metrics."""
        return bool(self.metrics_listen)

    @property
    def tls_files(self) -> TlsFiles | None:
        if not self.tls_cert:
            return None
        return TlsFiles(Path(self.tls_cert), Path(self.tls_key), Path(self.tls_ca) if self.tls_ca else None)

    def etcd_store(self) -> tuple[EtcdStore, Tls | None]:
        """Raises OSError or ValueError where a file cannot be used."""
        tls = None
        if self.etcd_tls_ca:
            cert, key = (Path(path) if path else None for path in (self.etcd_tls_cert, self.etcd_tls_key))
            tls = Tls(TlsFiles(cert, key, None if self.etcd_tls_ca == SYSTEM_CA else Path(self.etcd_tls_ca)))
        login = EtcdLogin(Path(self.etcd_login_file)) if self.etcd_login_file else None
        return EtcdStore(self.etcd.split(","), tls=tls, login=login), tls

    def peer_secret(self, getrandbits: Callable[[int], int]) -> PeerSecret:
        """Raises ConfigError, or OSError."""
        if not self.peer_secret_file:
            raise ConfigError("--peer-secret-file: must be set; the file is made where there is none")
        return PeerSecret.of_file(Path(self.peer_secret_file), getrandbits)

    def check_tls(self, listen: str, flag: str) -> None:
        """Raises ConfigError."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key: go together")
        if self.tls_ca and not self.tls_cert:
            raise ConfigError("--tls-ca: needs --tls-cert and --tls-key")
        host = listen.rpartition(":")[0]
        if not self.tls_cert and not self.allow_plain_text and not is_loopback(host):
            raise ConfigError(
                f"{flag}: {listen} can be reached from elsewhere, so it needs --tls-cert and --tls-key; "
                "--allow-plain-text goes without, and then keys and prompts can be read on the way"
            )

    def __post_init__(self) -> None:
        check_listen(self.listen)
        check_bounds(self)
        self._check_advertise()
        self.check_tls(self.listen, "--listen")
        if self.metrics_listen:
            check_listen(self.metrics_listen, "--metrics-listen")
            self.check_tls(self.metrics_listen, "--metrics-listen")
        self._check_etcd()

    def _check_etcd(self) -> None:
        if bool(self.etcd_tls_cert) != bool(self.etcd_tls_key):
            raise ConfigError("--etcd-tls-cert and --etcd-tls-key: go together")
        if self.etcd_tls_cert and not self.etcd_tls_ca:
            raise ConfigError("--etcd-tls-ca: is needed beside --etcd-tls-cert")
        if self.etcd_tls_ca or self.allow_plain_text:
            return
        for endpoint in self.etcd.split(","):
            host = endpoint.rpartition(":")[0]
            if host and not is_loopback(host):  # what is no address is said when it is dialled
                raise ConfigError(
                    f"--etcd: what goes to {endpoint} can be read on the way, so it needs --etcd-tls-ca; "
                    "--allow-plain-text goes without"
                )

    def _check_advertise(self) -> None:
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
