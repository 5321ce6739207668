"""A site on this machine with an adapter's files under /a/, for tests of what reads from one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME

CONTENT = {f"/a/{CONFIG_NAME}": b'{"r": 8}', f"/a/{WEIGHTS_NAME}": b"x" * 3_000_000}


class _Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        site: Site = self.server.site  # type: ignore[attr-defined]
        site.seen.append((self.path, self.headers.get("authorization", "")))
        if self.path in site.redirects:
            self.send_response(302)
            self.send_header("location", site.redirects[self.path])
            self.send_header("content-length", "0")
            self.end_headers()
            return
        content = site.content.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("content-length", str(len(content or b"") + site.lacking))
        self.end_headers()
        self.wfile.write(content or b"")
        if site.lacking:
            self.wfile.flush()
            site.is_over.wait(5)
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Site:
    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.content = dict(CONTENT)
        self.redirects: dict[str, str] = {}
        self.seen: list[tuple[str, str]] = []
        self.lacking = 0  # bytes that are promised and not sent
        self.is_over = threading.Event()


@contextmanager
def site_of() -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    server.daemon_threads = True
    site = server.site = Site(server.server_port)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        site.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()
