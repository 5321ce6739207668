"""Errors as OpenAI's clients read them."""

from __future__ import annotations

import pytest
from manylora_router.front.http import errors
from manylora_shared.errors import (
    FieldViolation,
    InvalidRequest,
    ManyloraError,
    NotFound,
    Overloaded,
    QuotaBreach,
    QuotaExceeded,
    Unauthenticated,
    Unready,
)
from manylora_shared.tenancy.quota import QuotaLevel


def test_fields_have_the_callers_names() -> None:
    fields = [
        "sampling.top_p",
        "prompt.chat.messages[3].role",
        "prompt.text",
        "x-request-class",
        "sampling.top_logprobs",
    ]
    error = InvalidRequest.of_all([FieldViolation(field, "is wrong") for field in fields])
    told = errors.ErrorForm().document(error, {"top_logprobs": "logprobs"})["error"]
    names = ["top_p", "messages[3].role", "prompt", "x-request-class", "logprobs"]
    assert told["message"] == "; ".join(f"{name}: is wrong" for name in names)
    assert (told["param"], told["type"], told["code"]) == ("top_p", "invalid_request_error", "invalid")


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (NotFound("x-adapter-id: adapter 'a' is not known"), "model: adapter 'a' is not known", "model"),
        (Unready("prompt.chat: no template"), "messages: no template", "messages"),
        (Overloaded("the cluster is full"), "the cluster is full", None),
    ],
)
def test_a_message_that_begins_with_a_field(error: ManyloraError, message: str, param: str | None) -> None:
    told = errors.ErrorForm().document(error, {"x-adapter-id": "model"})["error"]
    assert (told["message"], told["param"]) == (message, param)


def test_headers_say_when_to_come_again() -> None:
    assert errors.headers(Overloaded("", retry_after_s=0.25)) == {"retry-after": "1", "retry-after-ms": "250"}
    assert errors.headers(QuotaExceeded("never fits")) == {"x-should-retry": "false"}
    breaches = [
        QuotaBreach("classes.batch.token_bucket", "acme", 7, "", 900),
        QuotaBreach("quotas.concurrency", "acme", 2, ""),
        QuotaBreach("quotas.monthly_spend", "acme", 50, ""),
    ]
    told = errors.headers(QuotaExceeded("", retry_after_s=61.0, breaches=breaches))
    assert {name: told[name] for name in told if name.startswith("x-")} == {
        "x-ratelimit-limit-tokens": "900",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1s",
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m1s",
    }
    breaches = [
        QuotaBreach("quotas.requests_per_s", "acme", 3, "", 10),
        QuotaBreach("quotas.max_queued", "acme", 4, ""),
        QuotaBreach("key.tokens_per_min", "acme", 600, ""),
    ]
    told = errors.headers(QuotaExceeded("", retry_after_s=1.0, breaches=breaches))
    assert told["x-ratelimit-limit-requests"] == "10", "as behind a request that was admitted"
    assert told["x-ratelimit-limit-tokens"] == "600"
    assert errors.headers(Unauthenticated("")) == {"www-authenticate": "Bearer"}
    assert errors.headers(InvalidRequest("")) == {}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (1.42, "1.5s"), (59.99, "1m0s"), (360.0, "6m0s"), (3601.5, "60m2s")],
)
def test_durations_are_openais(seconds: float, told: str) -> None:
    [level] = [QuotaLevel("quotas.requests_per_s", 10, 3, seconds)]
    assert errors.rate_limits([level]) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": told,
    }
