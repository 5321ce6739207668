"""A small fake of Vault: one transit key with versions, and a key-value engine, over HTTP in a thread."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TOKEN = "vault-token-of-the-test"


class VaultServer:
    def __init__(self) -> None:
        self.versions = [secrets.token_bytes(32)]
        self.oldest = 1  # that still opens
        self.secrets: dict[str, dict[str, str]] = {}
        self.is_sealed = False
        self.seen: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """As Vault's HTTP API has it."""
        self.seen.append(path)
        if self.is_sealed:
            return 503, {"errors": ["Vault is sealed"]}
        match path.split("/"):
            case ["transit", "encrypt", "manylora"]:
                nonce = secrets.token_bytes(12)
                data = AESGCM(self.versions[-1]).encrypt(nonce, base64.b64decode(body["plaintext"]), _bound(body))
                text = f"vault:v{len(self.versions)}:{base64.b64encode(nonce + data).decode()}"
                return 200, {"data": {"ciphertext": text, "key_version": len(self.versions)}}
            case ["transit", "decrypt", "manylora"]:
                return self._decrypt(body)
            case ["transit", "keys", "manylora"]:
                return 200, {"data": {"latest_version": len(self.versions), "min_decryption_version": self.oldest}}
            case ["transit", "keys", "manylora", "rotate"]:
                self.versions.append(secrets.token_bytes(32))
                return 200, {"data": {}}
            case ["transit", "keys", "manylora", "config"]:
                self.oldest = body["min_decryption_version"]
                return 200, {"data": {}}
            case ["secret", "data", name] if name in self.secrets:
                return 200, {"data": {"data": self.secrets[name], "metadata": {"version": 1}}}
        return 404, {"errors": []}

    def _decrypt(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        _, version, text = body["ciphertext"].split(":")
        data = base64.b64decode(text)
        if int(version[1:]) < self.oldest:
            return 400, {"errors": ["ciphertext or signature version is disallowed by policy (too old)"]}
        try:
            plain = AESGCM(self.versions[int(version[1:]) - 1]).decrypt(data[:12], data[12:], _bound(body))
        except InvalidTag:
            return 400, {"errors": ["cipher: message authentication failed"]}
        return 200, {"data": {"plaintext": base64.b64encode(plain).decode()}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve({})

            def do_POST(self) -> None:
                self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _serve(self, body: dict[str, Any]) -> None:
                is_known = self.headers["X-Vault-Token"] == TOKEN
                path = self.path.removeprefix("/v1/")
                status, answer = server.answer(path, body) if is_known else (403, {"errors": ["permission denied"]})
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None: ...

        return Handler


def _bound(body: dict[str, Any]) -> bytes:
    return base64.b64decode(body["associated_data"])


@contextmanager
def running() -> Iterator[VaultServer]:
    server = VaultServer()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
