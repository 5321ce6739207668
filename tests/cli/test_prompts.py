"""Prompts and options as callers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from manylora.client import Client, RequestFailed, Sampling
from manylora.client.prompts import message_of, set_chat_options, set_prompt
from manylora.v1 import common_pb2, inference_pb2

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens: must be a whole number from 0 to 4294967295, not -1 (int)"),
    ({"max_tokens": "ten"}, "max_tokens: must be a whole number from 0 to 4294967295, not 'ten'"),
    ({"max_tokens": 1.5, "n": "2"}, "max_tokens: must be a whole number from 0 to 4294967295, not 1.5 (float); n: "),
    ({"stop": 5}, "stop: must be a list of which each is text, not 5 (int)"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids: must be a list of which each is a whole number"),
    ({"ignore_eos": "no"}, "ignore_eos: must be true or false, not 'no'"),
    ({"keep_s": -1}, "keep_s: must be a whole number"),
    ({"model": 5}, "model: must be text"),
    ({"adapter": 5}, "x-adapter-id: must be printable ASCII"),
    ({"timeout_s": "1"}, "timeout_s: must be int or float, not '1'"),
    ({"sampling": {"temperature": 1}}, "sampling: must be Sampling, not {'temperature': 1} (dict)"),
    ({"constraint": "json"}, "constraint: must be Constraint, not 'json'"),
    ({"sampling": Sampling(temperature="hot")}, "sampling.temperature: must be a number, not 'hot'"),  # type: ignore[arg-type]
    ({"sampling": Sampling(top_k=-3, seed=-1)}, "sampling.top_k: must be a whole number from 0"),
    ({"sampling": Sampling(logit_bias={1: "x"})}, "sampling.logit_bias: must be numbers by token id"),  # type: ignore[dict-item]
    ({"sampling": Sampling(bad_words="word")}, "sampling.bad_words: must be a list of which each is text, not 'word'"),
]


def test_a_prompt_is_text_token_ids_or_messages() -> None:
    for prompt, kind in (("hi", "text"), ([1, 2**32 - 1], "token_ids"), ([{"role": "user", "content": "hi"}], "chat")):
        request = inference_pb2.GenerateRequest()
        set_prompt(request, prompt)
        assert request.WhichOneof("prompt") == kind


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: must be text, token ids or chat messages, not NoneType"),
        (b"abc", "prompt: must be text, token ids or chat messages, not bytes"),
        ([{"role": "user"}], "prompt[0].content: must be given"),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt[0].content: must be text, not list"),
        ([{"role": "user", "content": None}], "prompt[0].content: must be text, not NoneType"),
        (
            [{"role": "user", "content": "a", "name": "b"}],
            "prompt[0].name: is not known, only role and content",
        ),
        ([{"role": "user", "content": "a"}, "b"], "prompt[1]: must be a chat message as the first is"),
        ([1, "a"], "prompt[1]: must be a token id, as the prompt is neither text nor messages"),
        ([-1], "prompt[0]: must be a token id, as the prompt is neither text nor messages"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(prompt: Any, message: str) -> None:
    with pytest.raises(RequestFailed) as failure:
        set_prompt(inference_pb2.GenerateRequest(), prompt)
    assert (failure.value.code, failure.value.message) == ("INVALID_ARGUMENT", message)


def test_options_of_a_chat() -> None:
    request = inference_pb2.GenerateRequest()
    set_prompt(request, [{"role": "assistant", "content": "{"}])
    given = {"enable_thinking": False}
    set_chat_options(request, continue_final_message=True, add_generation_prompt=False, chat_template_kwargs=given)
    chat = request.chat
    assert (chat.continue_final_message, chat.HasField("add_generation_prompt")) == (True, True)
    assert dict(chat.chat_template_kwargs) == given
    plain: dict[str, Any] = {"add_generation_prompt": None, "chat_template_kwargs": None}
    for text, options, field in (
        ("hi", {**plain, "continue_final_message": True}, "continue_final_message"),
        ("hi", {"add_generation_prompt": False, "continue_final_message": False, "chat_template_kwargs": None}, "add_"),
        (
            [{"role": "user", "content": "a"}],
            {**plain, "continue_final_message": False} | {"chat_template_kwargs": {"a": object()}},
            "chat_template_kwargs",
        ),
    ):
        request = inference_pb2.GenerateRequest()
        set_prompt(request, text)  # type: ignore[arg-type]
        with pytest.raises(RequestFailed, match=field):
            set_chat_options(request, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "words"), WRONG)
async def test_a_wrong_option_is_refused_by_its_name(nobody: str, options: Mapping[str, Any], words: str) -> None:
    async with Client(nobody) as client:
        with pytest.raises(RequestFailed) as refused:
            client.generate("hi", **options)
        assert (refused.value.code, refused.value.message[: len(words)]) == ("INVALID_ARGUMENT", words)


def test_right_options_fill_the_message() -> None:
    request = message_of(inference_pb2.GenerateRequest, {"max_tokens": 3, "stop": ("a",), "keep_s": None})
    assert request == inference_pb2.GenerateRequest(max_tokens=3, stop=["a"])
    sampling = message_of(common_pb2.SamplingParams, {"logit_bias": {5: 1.5}, "bad_words": ["x"]})
    assert sampling.logit_bias[5] == 1.5
