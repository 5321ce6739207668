"""OpenAI's own client against the real model: every answer is the oracle's, and validates against OpenAI's types."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch
from conftest import CALLS, Served
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.real_model import CAPITAL, LEARNED, MAX_TOKENS

pytestmark = pytest.mark.clients

PROMPT = "The capital of France is Paris, and the capital of Italy is"
MESSAGES: Any = CAPITAL
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


def sync(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


def chat_text(served: Served, adapter: str) -> str:
    prompt = served.oracle.rendered(CAPITAL, add_generation_prompt=True)
    return served.oracle.text(served.oracle.greedy(prompt, adapter))


@pytest.mark.parametrize("adapter", ["", *LEARNED])
def test_chat_whole_and_streamed(served: Served, adapter: str) -> None:
    with sync(served) as client:
        model = adapter or "smollm2"
        raw = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, **GREEDY)
        whole = ChatCompletion.model_validate_json(raw.content, strict=True)
        assert whole.choices[0].message.content == chat_text(served, adapter)
        stream = client.chat.completions.with_raw_response.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        lines = [line.removeprefix("data: ") for line in stream.http_response.iter_lines() if line.startswith("data")]
    assert lines[-1] == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines[:-1]]
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == chat_text(served, adapter)
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None


async def test_the_asynchronous_client(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:
        models = [Model.model_validate_json(each.model_dump_json(), strict=True) async for each in client.models.list()]
        assert [each.id for each in models] == ["smollm2", *sorted([CALLS, *LEARNED])]
        stream = await client.chat.completions.create(model="shout", messages=MESSAGES, stream=True, **GREEDY)
        assert "".join([each.choices[0].delta.content or "" async for each in stream]) == LEARNED["shout"]
        text = ""
        async for event in await client.responses.create(
            model="shout", input="What is the capital of France?", temperature=0, max_output_tokens=MAX_TOKENS,
            stream=True, store=False,
        ):  # fmt: skip
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == LEARNED["shout"]


def test_responses(served: Served) -> None:
    with sync(served) as client:
        raw = client.responses.with_raw_response.create(
            model="count", input=MESSAGES, temperature=0, max_output_tokens=MAX_TOKENS, store=False
        )
    answer = Response.model_validate_json(raw.content, strict=True)
    assert answer.output_text == LEARNED["count"]


@pytest.mark.parametrize("adapter", ["", *LEARNED])
def test_a_prompts_log_probabilities_are_the_oracles(served: Served, adapter: str) -> None:
    """As lm-eval asks for them, and as vLLM's clients do."""
    ids: list[int] = served.oracle.tokenizer(PROMPT)["input_ids"]
    expected = torch.log_softmax(served.oracle.logits(ids, adapter), -1)
    wanted = [float(expected[i, token_id]) for i, token_id in enumerate(ids[1:])]
    with sync(served) as client:
        for prompt in (ids, PROMPT):
            answer = client.completions.create(
                model=adapter or "smollm2", prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
            )
            told: Any = answer.choices[0].logprobs
            assert told.token_logprobs[0] is None
            assert told.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-3)
            for row, top in zip(expected[:-1], told.top_logprobs[1:-1], strict=True):
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
            assert answer.choices[0].text.startswith(PROMPT)
            assert "".join(told.tokens[:-1]) == PROMPT
            assert math.isclose(told.token_logprobs[-1], float(expected[-1].max()), abs_tol=1e-3)
        alone: Any = client.completions.create(
            model=adapter or "smollm2", prompt=ids, echo=True, logprobs=0, max_tokens=0
        )
        assert alone.choices[0].text == PROMPT
        assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
        more: Any = client.completions.create(
            model=adapter or "smollm2", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 2}
        )
        positions = more.choices[0].prompt_logprobs
        values = [each[str(token_id)] for each, token_id in zip(positions[1:], ids[1:], strict=True)]
        assert [each["logprob"] for each in values] == pytest.approx(wanted, abs=1e-3)
        assert [each["decoded_token"] for each in values] == [served.oracle.tokenizer.decode([i]) for i in ids[1:]]


def test_completions_of_several_prompts(served: Served) -> None:
    ids = served.oracle.tokenizer(PROMPT)["input_ids"]
    expected = served.oracle.text(served.oracle.greedy(ids, ""))
    with sync(served) as client:
        raw = client.completions.with_raw_response.create(
            model="smollm2", prompt=[PROMPT, ids], temperature=0, max_tokens=MAX_TOKENS
        )
    answer = Completion.model_validate_json(raw.content, strict=True)
    assert [each.text for each in answer.choices] == [expected, expected]


def test_allowed_tokens_are_a_choice_of_words(served: Served) -> None:
    allowed = [served.oracle.tokenizer(word)["input_ids"][0] for word in (" Rome", " Paris")]
    with sync(served) as client:
        answer = client.completions.create(
            model="smollm2", prompt=PROMPT, temperature=0, max_tokens=1, extra_body={"allowed_token_ids": allowed}
        )
    assert answer.choices[0].text == " Rome"
