"""The public client against a fake router in the same process: events, retries, deadlines, cancellation, uploads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from manylora.client import (
    AdapterFolder,
    Client,
    Delta,
    Finished,
    GenerateOptions,
    RequestFailed,
    RetryPolicy,
    Sampling,
    Started,
)

from tests.cli.fake_server import VERSION, FakeRouter

QUICK = RetryPolicy(max_attempts=3, base_delay_s=0.001, max_delay_s=1.0)


async def test_events_come_in_order_and_add_up(address: str) -> None:
    async with Client(address, tenant="acme") as client:
        stream = client.generate("one two", sampling=Sampling(temperature=0.0, logit_bias={3: -1.0}))
        events = [event async for event in stream]
    assert isinstance(events[0], Started)
    assert [(e.first_position, e.token_ids, e.text) for e in events[1:-1] if isinstance(e, Delta)] == [
        (0, (100,), "ONE"),
        (1, (101,), " TWO"),
    ]
    assert isinstance(events[-1], Finished)
    result = stream.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("ONE TWO", (100, 101), "stop")
    assert (result.adapter_version, result.seed, result.worker_id) == (VERSION, 7, "w-1")
    assert result.choices[0].stop_string == "x"
    assert result.choices[0].stop_token_id is None


async def test_chat_and_all_options_reach_the_server(address: str, router: FakeRouter) -> None:
    router.has_chat_template = True
    async with Client(address, tenant="acme", retry=None) as client:
        await client.complete(
            [{"role": "user", "content": "hi"}],
            tenant="birch",
            priority=-3,
            n=2,
            ignore_eos=True,
            stop_token_ids=[5],
            idempotency_key="k",
            sampling=Sampling(top_k=4, top_logprobs=0, logit_bias={3: -1.0}, min_tokens=2, bad_words=["no"]),
        )
    request, metadata = router.requests[0], router.metadata[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi")]
    assert (request.n, request.ignore_eos, list(request.stop_token_ids)) == (2, True, [5])
    assert (request.sampling.top_k, request.sampling.HasField("top_logprobs")) == (4, True)
    assert dict(request.sampling.logit_bias) == {3: -1.0}
    assert (request.sampling.min_tokens, list(request.sampling.bad_words)) == (2, ["no"])
    assert (metadata["x-tenant-id"], metadata["x-priority"], metadata["idempotency-key"]) == ("birch", "-3", "k")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("x" * 5_000_000, "text"),
        ([{"role": "user", "content": "x" * 3_000_000}] * 2, "chat.messages"),
        ([70_000] * 2_000_000, "token_ids.ids"),
    ],
)
async def test_a_request_that_no_server_takes_is_refused_by_its_largest_field(
    prompt: Any, field: str, address: str, router: FakeRouter
) -> None:
    async with Client(address, tenant="acme") as client:
        with pytest.raises(
            RequestFailed, match=f"{field}: has [0-9]+ bytes; a request has at most 4194304 in all"
        ) as e:
            await client.complete(prompt)
        assert e.value.code == "INVALID_ARGUMENT"
        with pytest.raises(RequestFailed, match="policy_yaml: has "):
            await client.tenants.apply("#" * 5_000_000)
    assert not router.requests


@pytest.mark.parametrize("prompt", ["overloaded", "unavailable"])
async def test_what_may_pass_is_tried_again(address: str, router: FakeRouter, prompt: str) -> None:
    router.failures_left = 2
    async with Client(address, tenant="acme", retry=QUICK) as client:
        assert (await client.complete(prompt)).text == prompt.upper()
    assert len(router.requests) == 3


@pytest.mark.parametrize(
    ("prompt", "retry", "attempts", "code"),
    [
        ("unavailable", QUICK, 3, "UNAVAILABLE"),
        ("unavailable", None, 1, "UNAVAILABLE"),
        ("overloaded for ever", QUICK, 1, "RESOURCE_EXHAUSTED"),  # without a hint, waiting cannot help
        ("overloaded for long", QUICK, 1, "RESOURCE_EXHAUSTED"),  # longer than the client is willing to wait
        ("two wrongs", QUICK, 1, "INVALID_ARGUMENT"),
        ("one die", QUICK, 1, "UNAVAILABLE"),  # after the first frame nothing is repeated
    ],
)
async def test_what_is_not_tried_again(
    address: str, router: FakeRouter, prompt: str, retry: RetryPolicy | None, attempts: int, code: str
) -> None:
    router.failures_left = 100
    async with Client(address, tenant="acme", retry=retry) as client:
        with pytest.raises(RequestFailed) as failure:
            await client.complete(prompt)
    assert failure.value.code == code
    assert len(router.requests) == attempts


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("unavailable", {"code": "UNAVAILABLE", "reason": "UNAVAILABLE"}),
        ("one die", {"code": "UNAVAILABLE", "reason": "WORKER_LOST"}),
        ("overloaded for ever", {"code": "RESOURCE_EXHAUSTED", "reason": "OVERLOADED"}),
        ("overloaded for long", {"code": "RESOURCE_EXHAUSTED", "reason": "OVERLOADED", "retry_after_s": 60.0}),
    ],
)
async def test_a_failure_says_why_and_when_to_try_again(
    address: str, router: FakeRouter, prompt: str, told: dict[str, object]
) -> None:
    router.failures_left = 1
    async with Client(address, tenant="acme", retry=None) as client:
        with pytest.raises(RequestFailed) as failure:
            await client.complete(prompt)
    shown = failure.value.to_json()
    assert {key: value for key, value in shown.items() if key not in ("message", "violations")} == told
    assert failure.value.reason == told["reason"]


async def test_a_failure_after_frames_holds_what_came(address: str) -> None:
    async with Client(address, tenant="acme") as client:
        with pytest.raises(RequestFailed, match=r"UNAVAILABLE: worker w-1 was lost") as failure:
            await client.complete("one die")
    assert failure.value.result is not None
    assert failure.value.result.text == "ONE DIE"
    assert failure.value.result.outcome == "worker_lost"
    assert failure.value.result.usage.completion_tokens == 2


async def test_the_deadline_covers_all_attempts(address: str, router: FakeRouter) -> None:
    router.failures_left = 10**9
    patient = RetryPolicy(max_attempts=10**6, base_delay_s=0.01, max_delay_s=0.05, budget_attempts=1e9)
    async with Client(address, tenant="acme", retry=patient) as client:
        with pytest.raises(RequestFailed, match="UNAVAILABLE"):
            await asyncio.wait_for(client.complete("unavailable", timeout_s=0.3), 5)
        with pytest.raises(RequestFailed, match="DEADLINE_EXCEEDED"):
            await asyncio.wait_for(client.complete("hang", timeout_s=0.2), 5)


async def test_leaving_a_stream_cancels_its_request(address: str, router: FakeRouter) -> None:
    async with Client(address, tenant="acme") as client:
        async with client.generate("hang on") as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        await _until(lambda: router.cancelled == 1)
        task = asyncio.create_task(client.complete("hang on"))
        await _until(lambda: len(router.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: router.cancelled == 2)


async def test_a_stream_that_is_dropped_is_cancelled(address: str, router: FakeRouter) -> None:
    async with Client(address, tenant="acme") as client:
        async for event in client.generate("hang on", stop="end"):
            if isinstance(event, Delta):
                break
        await _until(lambda: router.cancelled == 1)
    assert list(router.requests[0].stop) == ["end"]


async def test_uploads_report_progress_and_refuse_what_is_no_adapter(
    address: str, router: FakeRouter, adapter_folder: Path
) -> None:
    progress: list[tuple[int, int]] = []
    async with Client(address) as client:
        added = await client.adapters.add(
            "acme", "upper", adapter_folder, on_progress=lambda sent, total: progress.append((sent, total))
        )
        assert (added.name, added.target_modules) == ("upper", ("k_proj", "q_proj"))
        size_bytes = AdapterFolder.open(adapter_folder).size_bytes
        assert progress[0] == (0, size_bytes)
        assert progress[-1] == (size_bytes, size_bytes)
        with pytest.raises(RequestFailed, match="ALREADY_EXISTS"):
            await client.adapters.add("acme", "upper", adapter_folder)
        weights = adapter_folder / "adapter_model.safetensors"
        weights.rename(adapter_folder / "elsewhere")
        weights.symlink_to(adapter_folder)
        with pytest.raises(RequestFailed, match=r"adapter_model.safetensors: is not a regular file"):
            await client.adapters.add("acme", "other", adapter_folder)
        with pytest.raises(RequestFailed, match="is not a folder"):
            await client.adapters.add("acme", "other", adapter_folder / "elsewhere")
    assert list(router.adapters) == [("acme", "upper")]


async def test_models_and_health(address: str, nobody: str) -> None:
    async with Client(address, tenant="acme") as client:
        await client.wait_until_serving(5)
        assert (await client.list_models()).adapters == ("a", "b")
    async with Client(nobody) as client:
        with pytest.raises(RequestFailed, match=rf"DEADLINE_EXCEEDED: {nobody} was not serving in 0.2 s"):
            await client.wait_until_serving(0.2)


async def test_a_call_after_the_close_says_so(address: str, router: FakeRouter, adapter_folder: Path) -> None:
    client = Client(address)
    await client.close()
    for call in (
        client.wait_until_serving(60),
        client.status(),
        client.complete("hi"),
        client.adapters.add("acme", "a", adapter_folder),
    ):
        with pytest.raises(RequestFailed, match="FAILED_PRECONDITION: this client is closed"):
            await call
    assert router.requests == []


def test_complete_takes_the_keywords_of_generate() -> None:
    parameters = inspect.signature(Client.generate, eval_str=True).parameters
    keywords = {name: each.annotation for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert get_type_hints(GenerateOptions) == keywords


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_an_http_port_is_told_from_nobody() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Client(address, retry=None) as client:
        with pytest.raises(RequestFailed, match=f"{address} speaks HTTP/1.1"):
            await client.complete("x", timeout_s=10)
