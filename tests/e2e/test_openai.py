"""OpenAI's own client against a running cluster: the answers that gRPC gives, in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from conftest import UpCluster
from manylora.client import Client, Sampling

pytestmark = pytest.mark.e2e


async def tenants_key(cluster: UpCluster, tenant: str) -> str:
    async with Client(cluster.router) as client:
        return (await client.keys.create(tenant=tenant, scopes=["generate"]))[0]


async def test_answers_are_grpcs(cluster: UpCluster) -> None:
    key = await tenants_key(cluster, "acme")
    url = f"http://{cluster.ready['http']}"
    async with Client(cluster.router, key=key) as grpc, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        assert [model.id async for model in client.models.list()][1:] == ["reverse", "upper"]
        greedy = Sampling(temperature=0, top_logprobs=1)
        words = ["copper lantern", "one two three", "a"]
        expected = [await grpc.complete(word, adapter="upper", sampling=greedy) for word in words]
        whole = await client.completions.create(model="upper", prompt=words, temperature=0, logprobs=1)
        assert [choice.text for choice in whole.choices] == [each.text for each in expected]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == sum(each.usage.completion_tokens for each in expected)
        stream = await client.completions.create(model="upper", prompt=words[0], temperature=0, stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == expected[0].text
        messages: list[Any] = [{"role": "user", "content": "lantern"}]
        for adapter in ("upper", "reverse"):
            chat = await grpc.complete(messages, adapter=adapter, sampling=greedy)
            told = await client.chat.completions.create(model=adapter, messages=messages, temperature=0)
            assert told.choices[0].message.content == chat.text
        tokens = await client.post(f"{url}/tokenize", cast_to=dict, body={"prompt": words[0]})
        text = await client.post(f"{url}/detokenize", cast_to=dict, body={"tokens": tokens["tokens"]})
        assert str(text["prompt"]).endswith(words[0])


def test_the_synchronous_client_too(cluster: UpCluster) -> None:
    key = asyncio.run(tenants_key(cluster, "birch"))
    with openai.OpenAI(base_url=f"http://{cluster.ready['http']}/v1", api_key=key, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="words", messages=[{"role": "user", "content": "hi"}], stream=True, max_completion_tokens=8
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="upper", prompt="x")  # acme's
