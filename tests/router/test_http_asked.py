"""What a body's fields and the headers become."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_router.front.http.api.asked import HARMLESS, Caller, Form, caller_of, read
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import RequestInput
from manylora_router.guard.pools import ModelNames
from manylora_shared.sampling import PARAMETERS, Kind

NOBODY = caller_of({})
VALUES: dict[Kind, Any] = {
    Kind.NUMBER: 0.5,
    Kind.COUNT: 3,
    Kind.BIASES: {"7": 1.5},
    Kind.WORDS: ("a", "b"),
    Kind.TOKENS: [7, 8],
}


def asked(
    document: dict[str, Any], caller: Caller = NOBODY, top_logprobs: int | None = None
) -> tuple[RequestInput, Form, list[str]]:
    fields = Fields(document)
    names = ModelNames({"base": "default"}, "base")
    request, form = read(fields, caller, names, max_tokens=None, top_logprobs=top_logprobs)
    fields.close()
    return request, form, [f"{v.field}: {v.description}" for v in fields.found]


@pytest.mark.parametrize("row", [row for row in PARAMETERS if "logprobs" not in row.name], ids=lambda row: row.name)
def test_each_row_of_the_table_is_a_field(row: Any) -> None:
    request, _, found = asked({row.name: list(VALUES[row.kind]) if row.kind is Kind.WORDS else VALUES[row.kind]})
    expected = {Kind.BIASES: {7: 1.5}}.get(row.kind, VALUES[row.kind])
    assert (list(request.sampling.given().items()), found) == ([(row.name, expected)], [])
    assert asked({row.name: None})[0].sampling.given() == asked({})[0].sampling.given() == {}
    assert asked({row.name: {"a": "b"}})[2] != []


def test_the_rest_of_a_request() -> None:
    headers = {
        "authorization": "Bearer k",
        "x-tenant-id": "acme",
        "x-request-class": "batch",
        "idempotency-key": "once",
        "traceparent": "00-1",
    }
    document = {"n": 2, "stop": "x", "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False, "seed": 7}
    request, form, found = asked({**document, "priority": 3, "model": "base:upper"}, caller_of(headers), 2)
    assert found == []
    assert (request.n, request.stop, request.stop_token_ids) == (2, ("x",), [5])
    assert (request.ignore_eos, request.skip_special_tokens) == (True, False)
    assert (request.adapter, request.priority) == ("upper", "-3")
    assert (request.authorization, request.tenant, request.request_class) == ("Bearer k", "acme", "batch")
    assert (request.idempotency_key, request.traceparent) == ("once", "00-1")
    assert (request.sampling.top_logprobs, form.model, form.has_logprobs, form.has_usage) == (
        2,
        "base:upper",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("model", "header", "adapter"),
    [
        ("base", "", ""),
        ("", "", ""),
        ("base", "upper", "upper"),
        ("upper", "", "upper"),
        ("base:upper", "upper", "upper"),
        ("upper", "lower", None),
    ],
)
def test_a_model_is_the_base_or_an_adapter(model: str, header: str, adapter: str | None) -> None:
    request, _, found = asked({"model": model}, caller_of({"x-adapter-id": header}))
    assert (found == []) == (adapter is not None)
    assert adapter is None or request.adapter == adapter


def test_anthropics_key_is_a_key() -> None:
    assert caller_of({"x-api-key": "k"}).authorization == "Bearer k"
    assert caller_of({"x-api-key": "k", "authorization": "Bearer a"}).authorization == "Bearer a"


def test_what_changes_nothing_is_ignored() -> None:
    _, _, found = asked({**dict.fromkeys(HARMLESS, "x"), "store": False, "response_format": {"type": "text"}})
    assert found == []


@pytest.mark.parametrize(
    "document",
    [
        {"store": True},
        {"response_format": {"type": "yaml"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"structural_tag": "a"}},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},  # but by who tells them
        {"cache_salt": "x"},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"what": 1}},
        {"priority": "high"},
        {"nobody": 1},
    ],
)
def test_what_is_not_built_is_refused_by_name(document: dict[str, Any]) -> None:
    [found] = asked(document)[2]
    assert found.startswith(list(document)[-1])


def test_a_priority_is_given_once() -> None:
    [found] = asked({"priority": 1}, caller_of({"x-priority": "1"}))[2]
    assert found.startswith("priority: is given as the header x-priority too")
