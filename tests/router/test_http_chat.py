"""Chat completions as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from http_fakes import http_front
from manylora.v1 import common_pb2, scheduler_pb2, worker_pb2
from manylora_shared.errors import Code
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from router_fakes import STARTED, FakeWorker, finished, ids_of, say, tokens, until

HI: Any = [{"role": "user", "content": "hi"}]


async def with_logprobs(request: worker_pb2.ExecuteRequest) -> Any:
    yield STARTED
    frame = tokens(1, 0, ids_of("ab"), finish=common_pb2.FINISH_REASON_STOP, stop_token_id=2)
    for token_id in ids_of("ab"):
        found = frame.tokens.choices[0].logprobs.add(logprob=-0.5)
        found.top.add(token_id=token_id, logprob=-0.5)
        found.top.add(token_id=ids_of("x")[0], logprob=float("-inf"))
    yield frame
    yield finished(2, cached_prompt_tokens=1)


async def test_an_answer_is_openais_to_the_letter() -> None:
    async with http_front(with_logprobs) as front, front.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="upper", messages=HI, logprobs=True, top_logprobs=2, extra_headers={"X-Request-Id": "mine"}
        )
        answer = ChatCompletion.model_validate_json(raw.content, strict=True)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "upper", "chatcmpl-")
    computes = FakeWorker("w", with_logprobs).record("127.0.0.1:1")
    assert answer.system_fingerprint == f"fp_{computes.fingerprint[:10]}"
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("ab", "assistant", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    told = [(each.token, each.bytes, each.logprob) for each in choice.logprobs.content]
    assert told == [("a", [97], -0.5), ("b", [98], -0.5)]
    assert [each.logprob for each in choice.logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 2, 11)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-adapter-version"] == "a" * 64
    assert f"chatcmpl-{raw.headers['x-manylora-request-id']}" == answer.id


async def test_a_stream_is_openais_to_the_letter() -> None:
    async with http_front(with_logprobs) as front, front.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        lines = [line async for line in raw.http_response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True) for line in lines[:-1]]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].delta.role for c in chunks if c.choices] == ["assistant", None, None]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ab"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, "stop"]
    assert chunks[1].choices[0].logprobs is not None
    assert [chunk.usage is not None for chunk in chunks] == [False, False, False, True]
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == ([], 2)


async def test_choices_of_a_stream_are_told_apart() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> Any:
        yield STARTED
        for choice in range(request.n):
            ids = ids_of("ab"[choice])
            yield tokens(choice + 1, 0, ids, choice=choice, finish=common_pb2.FINISH_REASON_LENGTH)
        yield finished(3)

    async with http_front(script) as front, front.openai() as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, n=2, stream=True)
        chunks = [chunk async for chunk in stream]
        text = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in (0, 1)]
        ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason == "length"]
        assert (text, ends) == (["a", "b"], [0, 1])
        assert all(chunk.usage is None for chunk in chunks)
        whole = await client.chat.completions.create(model="tiny", messages=HI, n=2)
        assert [choice.message.content for choice in whole.choices] == ["a", "b"]


async def test_a_client_that_goes_away_frees_the_worker() -> None:
    async with http_front(say("x" * 200, pause_s=0.01)) as front, front.openai() as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await front.cluster.at_rest()
        whole = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HI, max_tokens=200))
        await until(lambda: any(worker.running for worker in front.cluster.workers))
        whole.cancel()
        await asyncio.wait([whole])
        await front.cluster.at_rest()
        assert sum(worker.cancelled for worker in front.cluster.workers) == 2
        assert front.cluster.app.calls.counters.cancelled == 2


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> Any:
        yield STARTED
        yield tokens(1, len(request.emitted[0].token_ids) if request.emitted else 0, ids_of("ab"))

    async with http_front(script) as front, front.openai() as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError) as failed:
            await read()
        assert ("".join(texts), failed.value.code) == ("abab", "worker_lost"), (
            "another worker went on, and was lost too"
        )
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="tiny", messages=[*HI, *HI])
        assert refused.value.status_code == 503


async def test_answers_tell_what_is_left_of_quotas() -> None:
    async with http_front() as front, front.openai() as client:
        front.cluster.scheduler.lease_tokens = 1000
        front.cluster.scheduler.levels = [
            scheduler_pb2.QuotaLevel(quota="classes.standard.token_bucket", limit=900, left=120, full_in_s=7.8)
        ]
        for stream in (False, True):
            raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=HI, stream=stream)
            told = {name: value for name, value in raw.headers.items() if name.startswith("x-ratelimit-")}
            assert told == {
                "x-ratelimit-limit-tokens": "900",
                "x-ratelimit-remaining-tokens": "120",
                "x-ratelimit-reset-tokens": "7.8s",
            }
            await raw.http_response.aread()


async def test_refusals_tell_the_limit_that_answers_tell() -> None:
    async with http_front() as front, front.openai() as client:
        breach = scheduler_pb2.QuotaBreach(
            quota="classes.standard.token_bucket", tenant_id="acme", limit=100, description="d", capacity=900
        )
        front.cluster.scheduler.refusal = scheduler_pb2.Refusal(
            code=int(Code.RESOURCE_EXHAUSTED), message="m", retry_after_s=2.0, breaches=[breach]
        )
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=HI)
        told = {
            each: value for each, value in refused.value.response.headers.items() if each.startswith("x-ratelimit-")
        }
        assert told == {
            "x-ratelimit-limit-tokens": "900",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "2s",
        }


async def test_token_ids_are_told_as_vllm_tells_them() -> None:
    async with http_front() as front, front.openai() as client:
        more = {"return_token_ids": True}
        whole: Any = await client.chat.completions.create(model="tiny", messages=HI, extra_body=more)
        assert whole.prompt_token_ids == ids_of("user: hi\n")
        assert whole.choices[0].token_ids == ids_of("hello world")
        stream: Any = await client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body=more)
        chunks: Any = [chunk async for chunk in stream]
        assert chunks[0].prompt_token_ids == ids_of("user: hi\n")
        assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
        assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == ids_of("hello world")
