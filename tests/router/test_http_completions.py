"""Completions as OpenAI's own client reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_fakes import http_front
from manylora.v1 import common_pb2, worker_pb2
from manylora_router.front.http.api.completions import MAX_PROMPTS
from openai.types import Completion
from router_fakes import STARTED, finished, ids_of, say, tokens
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


async def scoring(request: worker_pb2.ExecuteRequest) -> Any:
    """Tells the prompt in two frames, the second with the first tokens."""
    yield STARTED
    prompt = request.prompt_token_ids
    told = [common_pb2.PositionLogprobs(logprob=-float(i), rank=i) for i in range(1, len(prompt))]
    for each in told:
        each.top.add(token_id=ids_of("x")[0], logprob=-0.25)
    first = worker_pb2.ExecuteResponse(frame=1)
    first.tokens.prompt_logprobs.extend(told[:1])
    yield first
    frame = tokens(2, 0, ids_of("ab")[: request.max_tokens], finish=common_pb2.FINISH_REASON_LENGTH)
    frame.tokens.prompt_logprobs.extend(told[1:])
    frame.tokens.choices[0].logprobs.extend(
        common_pb2.PositionLogprobs(logprob=-0.5) for _ in range(min(2, request.max_tokens))
    )
    yield frame
    yield finished(3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
async def test_an_echo_has_the_prompts_logprobs(max_tokens: int, stream: bool) -> None:
    async with http_front(scoring) as front, front.openai() as client:
        answer: Any = await client.completions.create(
            model="tiny", prompt=[ids_of("hey")], echo=True, logprobs=1, max_tokens=max_tokens, stream=stream
        )
        parts = [part async for part in answer] if stream else [answer]
    choices = [part.choices[0] for part in parts]
    told = [choice.logprobs for choice in choices if choice.logprobs is not None]
    assert "".join(choice.text for choice in choices) == "hey" + "ab"[:max_tokens]
    assert [each for one in told for each in one.tokens] == [*"hey", *"ab"[:max_tokens]]
    assert [each for one in told for each in one.token_logprobs] == [None, -1.0, -2.0, -0.5, -0.5][: 3 + max_tokens]
    tops = [each for one in told for each in one.top_logprobs]
    assert tops[:3] == [None, {"e": -1.0, "x": -0.25}, {"y": -2.0, "x": -0.25}]
    assert [each for one in told for each in one.text_offset] == [0, 1, 2, 3, 4][: 3 + max_tokens]
    assert [choice.finish_reason for choice in choices][-1] == "length"


@pytest.mark.parametrize(("fields", "ends"), [({"logprobs": 1}, 0), ({"logprobs": 1, "max_tokens": 2}, 1), ({}, 1)])
async def test_one_token_behind_an_echo_with_logprobs_is_always_there(fields: dict[str, Any], ends: int) -> None:
    async with http_front(scoring if fields else None) as front, front.openai() as client:
        await client.completions.create(**{"model": "tiny", "prompt": "hi", "echo": True, "max_tokens": 1, **fields})
        [asked] = [request for worker in front.cluster.workers for request in worker.executed]
    assert len(asked.stop_token_ids) == ends


async def test_a_prompts_logprobs_by_themselves() -> None:
    async with http_front(scoring) as front, front.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt=["hi", "ho"], max_tokens=2, extra_body={"prompt_logprobs": 1}
        )
        for choice, last in zip(answer.choices, "io", strict=True):
            found: Any = choice
            [first, second] = found.prompt_logprobs
            assert first is None
            assert second[str(ids_of(last)[0])] == {"logprob": -1.0, "rank": 1, "decoded_token": last}
            assert len(second) == 2
            assert choice.logprobs is None
        messages: Any = [{"role": "user", "content": "hi"}]
        chat: Any = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"prompt_logprobs": 0}
        )
        assert chat.prompt_logprobs[0] is None
        assert [len(each) for each in chat.prompt_logprobs[1:]] == [1] * (chat.usage.prompt_tokens - 1)


async def test_many_are_put_into_words_beside_the_event_loop() -> None:
    async with http_front(scoring) as front, front.openai() as client:
        text = "x" * 200
        answer = await client.completions.create(model="tiny", prompt=text, echo=True, logprobs=20, max_tokens=0)
        [choice] = answer.choices
        assert choice.text == text
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == 200


async def silent(request: worker_pb2.ExecuteRequest) -> Any:
    """Tells nothing of the prompt."""
    yield STARTED
    yield tokens(1, 0, ids_of("x"), finish=common_pb2.FINISH_REASON_LENGTH)
    yield finished(2)


async def test_a_worker_that_keeps_some_back_fails_the_request() -> None:
    async with http_front(silent) as front, front.openai() as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="hi", extra_body={"prompt_logprobs": 1})


# Longer than the context, so that nobody looks at their ends.
ODD_TAILS: list[Any] = [[1] * 300 + ["x"], [[1] * 300 + ["x"]], [1] * 300 + [-1], [1] * 300 + [None]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": [10**6]}, "prompt[0]"),
        *(({"prompt": prompt, "echo": echo}, "prompt") for prompt in ODD_TAILS for echo in (False, True)),
        ({"prompt": "x" * 4000, "echo": True, "logprobs": 20, "model": "tiny"}, "prompt"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"extra_body": {"allowed_token_ids": [10**6]}}, "allowed_token_ids[0]"),
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
