"""What is told of a message's bytes: never wrong of one that can be parsed, and in the time that its bytes take."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from manylora.v1 import admin_pb2, inference_pb2
from manylora_shared.errors import InvalidRequest
from manylora_shared.transport.unparsed import check_fields, too_large

Request = inference_pb2.GenerateRequest
MAX_FIELDS = 5_120


def entry(number: int, data: bytes = b"") -> bytes:
    head, size = bytes([number << 3 | 2]), len(data)
    while size > 127:
        head += bytes([size & 127 | 128])
        size >>= 7
    return head + bytes([size]) + data


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (Request(text="x" * 200), "prompt.text: has 200 bytes; a request has at most 100 in all"),
        (Request(text="x", stop=["y" * 9] * 20), "stop: has 180 bytes"),
        (Request(stop_token_ids=[1] * 150), "stop_token_ids: has 150 bytes"),
    ],
)
def test_of_too_large_a_request_the_largest_field_is_named(message: Message, told: str) -> None:
    assert told in str(too_large(type(message), message.SerializeToString(), 100))


@given(st.binary(max_size=400))
def test_of_any_bytes_something_is_named(data: bytes) -> None:
    assert "100" in str(too_large(Request, data, 100))


BIAS = Request().sampling.DESCRIPTOR.fields_by_name["logit_bias"].number
CROWDS = {
    "prompt.chat": entry(3, entry(1) * 600_000),
    "stop": entry(6) * 600_000,
    "sampling": entry(5, entry(BIAS) * 600_000),
    "request": b"\xa2\x38\x00" * 400_000,  # a field that nobody knows
}


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_is_refused_by_name_and_in_no_time(name: str) -> None:
    began = time.perf_counter()
    with pytest.raises(InvalidRequest, match=f"{name}: has too many parts; a request has at most {MAX_FIELDS} in all"):
        check_fields(Request, CROWDS[name], MAX_FIELDS)
    assert time.perf_counter() - began < 0.1, "milliseconds"


def test_a_crowd_deep_within_is_one() -> None:
    variables = inference_pb2.GenerateRequest()
    many = variables.chat.chat_template_kwargs.fields["a"].list_value.values.add().struct_value
    for index in range(100):
        many.fields[str(index)].number_value = index
    data = variables.SerializeToString()
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: has too many parts"):
        check_fields(Request, data, 100)
    check_fields(Request, data, 1_000)


def test_what_a_request_may_be_passes() -> None:
    message = inference_pb2.ChatMessage(role="user", content="x" * 20)
    check_fields(
        Request, Request(chat=inference_pb2.ChatPrompt(messages=[message] * 4096)).SerializeToString(), MAX_FIELDS
    )
    ids = inference_pb2.TokenIds(ids=range(200_000))
    check_fields(Request, Request(token_ids=ids, stop=["x"] * 16).SerializeToString(), MAX_FIELDS)
    chunk = admin_pb2.AddAdapterRequest(chunk=admin_pb2.FileChunk(file_name="x", data=bytes(1 << 20)))
    check_fields(admin_pb2.AddAdapterRequest, chunk.SerializeToString(), MAX_FIELDS)


@given(st.binary(max_size=60))
def test_what_does_not_pass_is_no_message_or_has_a_group(data: bytes) -> None:
    passed, parsed = False, True
    with suppress(InvalidRequest):
        check_fields(Request, data, 100)
        passed = True
    try:
        Request.FromString(data)
    except DecodeError:
        parsed = False
    assert passed or not parsed or any(byte & 7 == 3 for byte in data), "a group that nobody knows"


@given(st.lists(st.text(max_size=5), max_size=6), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 8))
def test_no_message_of_ours_is_taken_for_none(stops: list[str], ids: list[int], n: int) -> None:
    check_fields(Request, Request(text="x", stop=stops, stop_token_ids=ids, n=n).SerializeToString(), 100)
