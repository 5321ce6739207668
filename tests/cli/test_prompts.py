"""Prompts as callers give them."""

from __future__ import annotations

from typing import Any

import pytest
from manylora.client import RequestFailed
from manylora.client.prompts import set_chat_options, set_prompt
from manylora.v1 import inference_pb2


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
