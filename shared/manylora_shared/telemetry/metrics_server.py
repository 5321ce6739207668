"""A port for `/metrics` alone, in threads of its own: no scrape stands in a service's event loop."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
from typing import Any

from manylora_shared.address import join_address, parse_address
from manylora_shared.telemetry.source import Telemetry

_TIMEOUT_S = 10.0
_AT_ONCE = 8  # connections; another one takes the oldest's place, which had time to ask and to read
_GOES_WITHIN_S = 1.0  # a connection that is cut off


class MetricsServer:
    """Whoever reaches the port may read: names of tenants and adapters, no text, no key."""

    def __init__(self, telemetry: Telemetry, listen: str, tls: ssl.SSLContext | None) -> None:
        """Serves. Port 0: any free one. Raises OSError where the address cannot be bound."""
        host, port = parse_address(listen)
        try:
            self._server = _Server((host, port), telemetry, tls)
        except OSError as e:
            raise OSError(e.errno, f"cannot listen on {listen}: {e.strerror}") from e
        self.address = join_address(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], telemetry: Telemetry, tls: ssl.SSLContext | None) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)
        self.telemetry = telemetry
        self._tls = tls
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._served: dict[Any, socket.socket] = {}  # by the client's address, the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._cut_oldest()
            if not self._places.acquire(timeout=_GOES_WITHIN_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._served[client_address] = request
        super().process_request(request, client_address)

    def _cut_oldest(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # it goes by itself
            for oldest in list(self._served)[:1]:
                self._served.pop(oldest).shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_TIMEOUT_S)
            if self._tls is not None:
                request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    if client_address in self._served:
                        self._served[client_address] = request
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)  # a handshake that failed
        finally:
            with self._lock:
                self._served.pop(client_address, None)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S
    server_version, sys_version = "manylora", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        told, content_type = self.server.telemetry.exposition(self.headers.get("accept", ""))
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""
