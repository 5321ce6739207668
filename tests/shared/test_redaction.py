"""What is removed from a log's text, and what stays."""

from __future__ import annotations

import time

import pytest
from manylora_shared.telemetry.redaction import REMOVED, Redaction, shortened

from tests.frozen_heap import frozen_heap

SECRET = "s3cr3t-" * 4


@pytest.mark.parametrize(
    "text",
    [
        f"authorization: Basic {SECRET}",
        f"Authorization={SECRET}",
        f"{{'authorization': 'Basic {SECRET}', 'x': 1}}",
        f'{{"Authorization": "Basic {SECRET}"}}',
        f"(('authorization', b'Basic {SECRET}'),)",
        f"_Metadatum(key='authorization', value=b'Basic {SECRET}')",
        f"(('x-manylora-peer', '{SECRET}'),)",
        f"""b'authorization: "quoted\\' {SECRET}"'""",
        f"'authorization', \"it's {SECRET}\"",
        f"'authorization', 'it\\'s {SECRET}'",
        f"proxy-authorization: {SECRET}",
        f"x-api-key: {SECRET}",
        f"sent Bearer {SECRET} to it",
        f"Bearer%20{SECRET}",
        f"key mlk-{SECRET}",
        f"MLK-{SECRET}",
        f"mlk%2d{SECRET}",
        f"token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiIxIn0.{SECRET}",
        f"cannot reach https://user:{SECRET}@models.internal/a",
        f"{{'X-Vault-Token': '{SECRET}', 'x': 1}}",
        f"Cookie: session={SECRET}; theme=dark",
        f"(('set-cookie', 'a={SECRET}'),)",
        f"connection failed: host=db user=u password={SECRET} dbname=usage",
        f"""password = '{SECRET}'""",
        f"{{'aws_secret_access_key': '{SECRET}'}}",
        f"GET https://bucket/a?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
        f"https://models.internal/a?token={SECRET}",
        f"https://models.internal/a?x=1&api_key={SECRET}&apikey={SECRET}",
        f'{{"client_secret": "{SECRET}"}}',
        f'{{\\"password\\": \\"{SECRET}\\"}}',
        f"401 for hf_{SECRET}",
        f"x-goog-api-key: {SECRET}",
        f"(('last-event-id', '{SECRET}'),)",
        f"password: {SECRET}",
        f"hvs.{SECRET} may not",
        f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    cleaned = Redaction().clean(text, 1000)
    assert SECRET not in cleaned
    assert "s3cr3t" not in cleaned
    assert REMOVED in cleaned


def test_what_stands_beside_a_secret_stays() -> None:
    redaction = Redaction()
    assert redaction.clean(f"{{'authorization': 'x {SECRET}', 'call': 'Generate'}}", 1000) == (
        f"{{'authorization': '{REMOVED}', 'call': 'Generate'}}"
    )
    plain = "adapter 0123abcd of tenant acme: the bearers of authorization differ (mlkit)"
    assert redaction.clean(plain, 1000) == plain
    for harmless in (
        "stop token: 128009",
        "max_tokens=1024, token=17",
        "a token: unreadable text",
        "secret: is not given",
    ):
        assert redaction.clean(harmless, 1000) == harmless
    redaction.hide(SECRET)
    redaction.hide("")
    assert redaction.clean(f"a {SECRET}{SECRET} b", 1000) == f"a {REMOVED}{REMOVED} b"


def test_long_texts_keep_both_ends() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("ab" + "x" * 100 + "yz", 4) == "ab ... [104 characters] ... yz"


@pytest.mark.parametrize(
    "piece",
    [
        "authorization: '",
        "mlk-",
        "mlk%2d",
        "eyJaaaaaaa.",
        "://a",
        "bearer ",
        "authorization, ",
        "\\'",
        "authorization:\\",
        "token=",
        "password\\'",
        "secret \n",
        "hf_",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN ",
    ],
)
def test_no_text_takes_long(piece: str) -> None:
    with frozen_heap():
        before_s = time.thread_time()
        Redaction().clean(piece * (1_000_000 // len(piece)), 4096)
        assert time.thread_time() - before_s < 0.5


def test_passing_secrets_are_bounded_and_put_no_other_out() -> None:
    redaction = Redaction()
    redaction.hide("fixed-one")
    for number in range(10_000):
        redaction.hide(f"token-number-{number:05}", is_passing=True)
    assert redaction.clean("fixed-one token-number-09999", 100) == f"{REMOVED} {REMOVED}"
    assert redaction.clean("token-number-00000", 100) == "token-number-00000"
