"""Tokens of a prompt, and back."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_fakes import Front, http_front
from router_fakes import ids_of


async def post(front: Front, path: str, body: dict[str, Any]) -> Any:
    async with front.openai() as client:
        return await client.post(f"{front.url}{path}", cast_to=dict, body=body)


async def test_a_text_and_its_tokens() -> None:
    async with http_front() as front:
        told = await post(front, "/tokenize", {"model": "tiny", "prompt": "hi", "return_token_strs": True})
        assert told == {"count": 2, "max_model_len": 256, "tokens": ids_of("hi"), "token_strs": ["h", "i"]}
        assert await post(front, "/detokenize", {"tokens": ids_of("hi")}) == {"prompt": "hi"}
        messages = [{"role": "user", "content": "hi"}]
        assert (await post(front, "/tokenize", {"messages": messages}))["tokens"] == ids_of("user: hi\n")


async def test_what_the_tokenizer_is() -> None:
    async with http_front() as front, front.openai() as client:
        told = await client.get(f"{front.url}/tokenizer_info", cast_to=dict)
    assert told == {"tokenizer_class": "FakeText", "eos_token": None, "chat_template": None, "model_max_length": 256}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x" * 5000}, "prompt"),
        ("/tokenize", {"prompt": "x", "what": 1}, "what"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * 300}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with http_front() as front:
        with pytest.raises(openai.BadRequestError) as refused:
            await post(front, path, body)
        assert refused.value.param == param
