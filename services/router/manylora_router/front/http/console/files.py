"""The console's pages, scripts and styles: files of this package, the same for everybody."""

from __future__ import annotations

import functools
from pathlib import Path

from manylora_shared.errors import NotFound, shown

from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.exchange import Exchange

PREFIX = "/console"
_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
# Nothing from elsewhere, nothing inline, in nobody's frame.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@functools.cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Bodies and content types by path."""
    found = {
        f"{PREFIX}/{file.relative_to(_STATIC).as_posix()}": (file.read_bytes(), _TYPES[file.suffix])
        for file in sorted(_STATIC.rglob("*"))
        if file.is_file()
    }
    page = found.pop(f"{PREFIX}/{_PAGE}")
    return {PREFIX: page, f"{PREFIX}/": page, **found}


def is_file(path: str) -> bool:
    return path.startswith(PREFIX) and path in _files()


async def file(exchange: Exchange, door: Door) -> None:
    if door.console is None:
        raise NotFound(f"there is no {shown(exchange.path)} here")
    body, content_type = _files()[exchange.path]
    await exchange.answer_bytes(body, content_type, headers=HEADERS)
