"""What a line of a log may hold: no key and no secret, and so much text at most."""

from __future__ import annotations

import re
from collections import deque

REMOVED = "[removed]"
_PASSING = 64
_RAW_CHARS = 1 << 18  # a longer text loses its middle before it is searched

# A name, what stands between it and its value in headers, tuples, mappings and gRPC's own classes, and the value: up
# to its closing quote, or to the line's end where there is none.
_NAMED = re.compile(
    r"""(?P<before> (?: authorization | x-manylora-peer | x-api-key | x-goog-api-key | x-vault-token
        | x-amz-security-token | last-event-id | cookie )
        \\?['"]? \s* (?: [:=,] | => ) \s*
        (?: value \s* = \s* )? b? )
    (?: (?P<quote> \\?['"]) (?: (?!(?P=quote)) (?: \\. | . ) )* | [^'"\n]+ )""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)
_BEARER = re.compile(r"\bbearer(?:\s|%20|\+)+[^\s'\",;)\]}]+", re.IGNORECASE)
_KEY = re.compile(r"mlk(?:-|%2d)(?:[0-9a-z_-]|%2d)*", re.IGNORECASE)
# What forms, queries of addresses, connection strings and settings call their secrets: up to what ends a value there.
_ASSIGNED = re.compile(
    r"""(?P<before> (?: password | passwd | secret | secret_access_key | token | api_?key | signature | credential )
        \\?['"]? \s* (?: = \s* \\?['"]? | : \s* \\?['"] ) | passw(?:or)?d \s* : \s* )  [^\s&;,'"()\\\]}]{8,}""",
    re.VERBOSE | re.IGNORECASE,
)
_BY_FORM = re.compile(r"\b(?:hf_|hvs\.|glpat-|gh[a-z]_|github_pat_)[\w.-]{16,}")
_PEM = re.compile(r"(-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----).*?(?:-----END|\Z)", re.DOTALL)
_WEB_TOKEN = re.compile(r"\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*")
_IN_ADDRESS = re.compile(r"(?<=://)[^/?#\s@'\"]{1,512}@")  # a user and password


def shortened(text: str, limit: int) -> str:
    """With its beginning and its end, and a note of how long it was."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... [{len(text)} characters] ... {text[-(limit // 2) :]}"


class Redaction:
    def __init__(self) -> None:
        self._secrets: list[str] = []
        self._passing: deque[str] = deque(maxlen=_PASSING)

    def hide(self, secret: str, *, is_passing: bool = False) -> None:
        """A secret that nothing else tells from other text. is_passing: others follow it; the last count."""
        kept = self._passing if is_passing else self._secrets
        if secret and secret not in kept:
            kept.append(secret)

    def clean(self, text: str, limit: int) -> str:
        text = shortened(text, _RAW_CHARS)
        for secret in (*self._secrets, *self._passing):
            text = text.replace(secret, REMOVED)
        text = _NAMED.sub(lambda found: found["before"] + (found["quote"] or "") + REMOVED, text)
        text = _BEARER.sub(f"Bearer {REMOVED}", text)
        text = _IN_ADDRESS.sub(f"{REMOVED}@", _WEB_TOKEN.sub(REMOVED, text))
        text = _PEM.sub(rf"\1{REMOVED}", _BY_FORM.sub(REMOVED, text))
        text = _ASSIGNED.sub(rf"\g<before>{REMOVED}", text)
        return shortened(_KEY.sub(f"mlk-{REMOVED}", text), limit)
