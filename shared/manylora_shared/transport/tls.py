"""Certificates on disk, and what a server or a client makes of them. They are read anew when the files change."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

_LOG = logging.getLogger(__name__)
SYSTEM_CA = "system"  # in place of a file: whom this machine trusts


class TlsError(ValueError):
    """Says which file, and what is wrong with it."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM. cert: the own chain, its leaf first; ca: who signs the others'; None: the system's roots."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise TlsError("a certificate and its key are given together")

    @property
    def all(self) -> Sequence[Path]:
        return [path for path in (self.cert, self.key, self.ca) if path is not None]


@dataclass(frozen=True)
class _Loaded:
    marks: Sequence[tuple[int, int]]  # of each file: when it was written, and its size
    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class Tls:
    """
    Args:
        asks_clients: whether who dials must show a certificate that `ca` signed.
    """

    def __init__(self, files: TlsFiles, *, asks_clients: bool = False) -> None:
        """Raises TlsError."""
        if asks_clients and files.ca is None:
            raise TlsError("certificates of clients are asked for, and no authority is given that signs them")
        self.asks_clients = asks_clients
        self.files = files
        self.generation = 0  # counts the changes
        self._context: ssl.SSLContext | None = None  # of this generation, where HTTP was asked for
        self._lock = threading.Lock()  # gRPC's threads ask, too
        self._loaded = _load(files)

    def refresh(self) -> bool:
        """Whether the files have changed, to something sound. What is not is logged, and the old goes on."""
        with self._lock:
            return self._refresh()

    def _refresh(self) -> bool:
        try:
            if _marks(self.files) == self._loaded.marks:
                return False
            loaded = _load(self.files)
            if self._context is not None:
                self._context = self._made_context()
            self._loaded = loaded
        except TlsError as e:
            _LOG.warning("certificates are not reloaded, the old ones stay: %s", e)
            return False
        self.generation += 1
        _LOG.info("certificates were reloaded: %s", ", ".join(str(path) for path in self.files.all))
        return True

    @property
    def expires_unix_s(self) -> float | None:
        """Of the own certificate; None: there is none."""
        if self._loaded.cert is None:
            return None
        return x509.load_pem_x509_certificate(self._loaded.cert).not_valid_after_utc.timestamp()

    def server_credentials(self) -> Any:
        """For gRPC. It asks at every handshake whether they are new."""

        given = self.generation

        def changed() -> Any:
            nonlocal given
            self.refresh()
            if given == self.generation:
                return None
            given = self.generation
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), changed, require_client_authentication=self.asks_clients
        )

    def _server_configuration(self) -> Any:
        loaded = self._loaded
        assert loaded.key is not None, "a server has a certificate"
        return grpc.ssl_server_certificate_configuration(
            [(loaded.key, loaded.cert)], root_certificates=loaded.ca if self.asks_clients else None
        )

    def channel_credentials(self) -> Any:
        """For gRPC, of this generation."""
        loaded = self._loaded
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def server_context(self) -> ssl.SSLContext:
        """For HTTP; it takes new certificates by itself."""
        # A context that is given another certificate has for a moment one that is not its key's, and gRPC's threads
        # exchange them in the midst of handshakes. So each generation has a context, and a handshake takes the newest.
        context = self._context = self._made_context()

        def take_newest(handshake: ssl.SSLObject, name: str, own: ssl.SSLContext) -> None:
            assert self._context is not None
            handshake.context = self._context

        context.sni_callback = take_newest
        return context

    def _made_context(self) -> ssl.SSLContext:
        """Raises TlsError."""
        assert self.files.cert is not None, "a server has a certificate"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.files.cert, self.files.key)
        except (ssl.SSLError, OSError) as e:  # changed since they were looked at
            raise TlsError(f"{self.files.cert} and {self.files.key}: {_reason(e)}") from e
        return context


def _marks(files: TlsFiles) -> Sequence[tuple[int, int]]:
    try:
        return [(found.st_mtime_ns, found.st_size) for found in (path.stat() for path in files.all)]
    except OSError as e:
        raise TlsError(f"{e.filename}: {e.strerror}") from e


def _load(files: TlsFiles) -> _Loaded:
    marks = _marks(files)
    cert, key, ca = (_read(path) for path in (files.cert, files.key, files.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.cert is not None:
        try:
            context.load_cert_chain(files.cert, files.key, password="")  # asks nobody for a word
        except (ssl.SSLError, OSError) as e:
            raise TlsError(f"{files.cert} and {files.key}: {_reason(e)}") from e
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except (ssl.SSLError, OSError) as e:
            raise TlsError(f"{files.ca}: {_reason(e)}") from e
    return _Loaded(marks, cert, key, ca)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as e:
        raise TlsError(f"{path}: {e.strerror}") from e


def _reason(error: OSError) -> str:
    match getattr(error, "reason", None):
        case "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        case None | "PEM_LIB" | "NO_START_LINE" | "PEM":
            return "no PEM that can be read"
        case reason:
            return str(reason).lower().replace("_", " ")
