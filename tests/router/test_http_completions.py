"""Completions as OpenAI's own client reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_fakes import http_front
from manylora_router.front.http.api.completions import MAX_PROMPTS
from openai.types import Completion
from router_fakes import ids_of, say
from test_http_chat import with_logprobs


async def test_an_answer_is_openais_to_the_letter() -> None:
    async with http_front(with_logprobs) as front, front.openai() as client:
        raw = await client.completions.with_raw_response.create(model="tiny:upper", prompt="hi", logprobs=1)
        answer = Completion.model_validate_json(raw.content, strict=True)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "tiny:upper", "cmpl-")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("ab", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1]
    assert choice.logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_every_kind_are_answered_in_order(stream: bool) -> None:
    async with http_front() as front, front.openai() as client:
        for prompt in ("hi", ["hi"], ["hi", "ho", "hu"], ids_of("hi"), [ids_of("hi"), ids_of("ho")]):
            want = len(prompt) if isinstance(prompt[0], list) or prompt[0] in ("hi", "ho") else 1
            answer: Any = await client.completions.create(model="tiny", prompt=prompt, echo=True, stream=stream)  # type: ignore[arg-type]
            texts = [""] * want
            for part in [part async for part in answer] if stream else [answer]:
                for choice in part.choices:
                    texts[choice.index] += choice.text
            firsts = ["hi", "ho", "hu"][:want]
            assert texts == [f"{first}hello world" for first in firsts]


async def test_one_prompt_that_is_refused_ends_all() -> None:
    async with http_front(say("x" * 50, pause_s=0.005)) as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt=["hi", "y" * 5000])
        assert refused.value.param == "prompt"
        await front.cluster.at_rest()


async def test_vllms_extras() -> None:
    async with http_front() as front, front.openai() as client:
        extras = {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": -1, "min_tokens": 1}
        answer = await client.completions.create(
            model="tiny", prompt="hi", stop=["wor"], seed=-1, extra_body={**extras, "include_stop_str_in_output": True}
        )
        choice: Any = answer.choices[0]
        assert (choice.text, choice.stop_reason, choice.finish_reason) == ("hello wor", "wor", "stop")
        assert (choice.token_ids, choice.prompt_token_ids) == (ids_of("hello wor"), ids_of("hi"))
        asked = [request for worker in front.cluster.workers for request in worker.executed]
        assert asked[-1].sampling.seed == 2**64 - 1
        stream = await client.completions.create(
            model="tiny", prompt="hi", stop=["wor"], stream=True, extra_body={"include_stop_str_in_output": True}
        )
        assert "".join([part.choices[0].text async for part in stream]) == "hello wor"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": [10**6]}, "prompt[0]"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"logprobs": 99}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 9}, "n"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with http_front() as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**{"model": "tiny", "prompt": "hi", **fields})
        assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
