"""A real small chat model through the whole cluster: its own template and tokenizer, adapters trained on it.

Greedy tokens equal transformers + peft. The model (SmolLM2-135M-Instruct) is made by ../shared/models/smollm2 from a
package of the Python index, once a machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from manylora.client import Client, Result, Sampling
from manylora.local.cluster import ClusterOptions, LocalCluster

from tests.real_model import (
    CAPITAL,
    LEARNED,
    MAKER,
    MAX_TOKENS,
    TOOLS,
    Messages,
    Oracle,
    model_folder,
    taught,
    taught_to_call,
)

TENANT = "acme"
GREEDY = Sampling(temperature=0)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wide,
    pytest.mark.skipif(MAKER is None, reason="there is no ../shared/models/smollm2, which makes the model"),
]

CHATS: dict[str, Messages] = {
    "one turn": CAPITAL,
    "a system's message": [{"role": "system", "content": "You answer in one word."}, *CAPITAL],
    "turns": [
        {"role": "user", "content": "Name a colour.\n\nJust one."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Name one more 🎨, and a number: 1234."},
    ],
    "tools": [
        {
            "role": "system",
            "content": 'You may call functions. <tools>[{"name": "weather", "parameters": {"city": "string"}}]'
            '</tools> Answer with <tool_call>[{"name": ..., "arguments": {...}}]</tool_call>.',
        },
        {"role": "user", "content": "How is the weather in Paris?"},
        {
            "role": "assistant",
            "content": '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>',
        },
        {"role": "tool", "content": '{"sky": "clear", "celsius": 21}'},
    ],
    "a long one": [{"role": "user", "content": "Sum this up: " + "The cat sat on the mat. " * 40}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def oracle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return taught(folder, tmp_path_factory.mktemp("adapters"))


@dataclass(frozen=True)
class Serving:
    client: Client
    http: str
    oracle: Oracle

    async def chat(self, messages: Messages, adapter: str = "", **options: Any) -> Result:
        return await self.client.complete(
            messages, adapter=adapter, max_tokens=MAX_TOKENS, sampling=GREEDY, timeout_s=120, **options
        )

    def expect(self, result: Result, prompt: Sequence[int], adapter: str) -> None:
        expected = self.oracle.greedy(prompt, adapter)
        assert list(result.token_ids) == expected
        assert result.usage.prompt_tokens == len(prompt)
        decode = self.oracle.tokenizer.decode
        assert decode(prompt, skip_special_tokens=True) + result.text == decode(
            [*prompt, *expected], skip_special_tokens=True
        )


@pytest.fixture
async def serving(folder: Path, oracle: Oracle, tmp_path: Path) -> AsyncIterator[Serving]:
    options = ClusterOptions(
        model=folder,
        model_name="smollm2",
        data=tmp_path / "data",
        http_port=0,
        worker_flags=("--prefill-chunk-tokens=48",),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router, tenant=TENANT) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}")
        for name, path in oracle.adapters.items():
            await client.adapters.add(TENANT, name, path)
        yield Serving(client, cluster.http_addresses[0], oracle)


async def test_chats_equal_peft(serving: Serving) -> None:
    asked = [(messages, adapter) for messages in CHATS.values() for adapter in ("", *LEARNED)]
    results = await asyncio.gather(*(serving.chat(*each) for each in asked))
    for (messages, adapter), result in zip(asked, results, strict=True):
        serving.expect(result, serving.oracle.rendered(messages, add_generation_prompt=True), adapter)
    texts = {
        adapter: result.text for (messages, adapter), result in zip(asked, results, strict=True) if messages is CAPITAL
    }
    assert "Paris" in texts[""]
    assert {name: texts[name] for name in LEARNED} == LEARNED

    await the_conversation_goes_on(serving, results[0].text)
    await openai_says_the_same(serving, texts)


async def the_conversation_goes_on(serving: Serving, answer: str) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"}]
    result = await serving.chat(messages)
    serving.expect(result, serving.oracle.rendered(messages, add_generation_prompt=True), "")
    assert result.usage.cached_prompt_tokens > 0
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of France, a country in"}]
    result = await serving.chat(begun, continue_final_message=True)
    serving.expect(result, serving.oracle.rendered(begun, continue_final_message=True), "")


async def openai_says_the_same(serving: Serving, texts: Mapping[str, str]) -> None:
    key = (await serving.client.keys.create(tenant=TENANT, scopes=["generate"]))[0]
    async with openai.AsyncOpenAI(base_url=f"http://{serving.http}/v1", api_key=key, max_retries=0) as client:
        for adapter, text in texts.items():
            messages: Any = CAPITAL
            stream = await client.chat.completions.create(
                model=adapter or "smollm2", messages=messages, temperature=0, max_tokens=MAX_TOKENS, stream=True
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


async def test_a_call_that_the_model_writes_is_read(folder: Path, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    taught_to_call(folder, base, adapter)
    options = ClusterOptions(model=base, model_name="smollm2", data=tmp_path / "data", http_port=0)
    async with LocalCluster(options) as cluster, Client(cluster.router, tenant=TENANT) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}")
        await client.adapters.add(TENANT, "calls", adapter)
        key = (await client.keys.create(tenant=TENANT, scopes=["generate"]))[0]
        url = f"http://{cluster.http_addresses[0]}/v1"
        messages: Any = CAPITAL
        asked: Any = {"model": "calls", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as caller:
            whole: Any = await caller.chat.completions.create(**asked)
            async with caller.chat.completions.stream(**asked) as stream:
                streamed: Any = await stream.get_final_completion()
    for choice in (whole.choices[0], streamed.choices[0]):
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("capital", '{"of": "France"}')
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
